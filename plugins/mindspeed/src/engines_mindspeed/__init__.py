"""Megatron-Core on Ascend NPUs, patched by MindSpeed. Nothing happens on import; `engine.toml` says what is here."""
