"""The arithmetic in PyTorch: slow and plainly right, on any device."""
