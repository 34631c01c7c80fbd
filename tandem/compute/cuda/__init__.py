"""Attention on NVIDIA GPUs: backends over the libraries that are there, and our own Triton kernels."""
