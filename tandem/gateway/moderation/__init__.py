"""Says of prompts and answers whether they may pass."""
