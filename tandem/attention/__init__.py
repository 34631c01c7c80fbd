"""Kernels over the arena: they read and write KV tensors and decide nothing."""
