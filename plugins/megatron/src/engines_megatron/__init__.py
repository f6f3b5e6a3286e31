"""The Megatron-Core engine of engines. Nothing happens on import; `engine.toml` says what is here."""
