"""What a run writes, and how it looks while it does."""
