"""Reference implementations of arithmetic and attention in PyTorch: slow and plainly right, on any device."""
