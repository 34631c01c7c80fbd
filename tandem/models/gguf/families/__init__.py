"""GGUF's architectures by family: a table of each one's tensors in a checkpoint, and a reader of its own keys."""
