"""The decoder's arithmetic: one seam, a PyTorch implementation for any device and a compiled one for the CPU."""
