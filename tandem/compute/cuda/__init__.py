"""Arithmetic and attention on NVIDIA GPUs: backends that use other libraries, and Tandem's own Triton kernels."""
