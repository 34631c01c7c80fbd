"""Programs that make what the repository ships; nothing here is imported at run time."""
