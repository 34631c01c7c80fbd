"""Compiled CPU kernels and their PyTorch twins.

`library.load()` gives the compiled ones, `fallback.TorchKernels()` the plain ones; both have the same methods and pass
the same contract suite. The compiled ones promise more: a row's result is bit-identical whatever else is in the call.
"""
