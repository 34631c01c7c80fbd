"""GGUF's architectures: a table for each family of where its tensors go, and what reads its own keys."""
