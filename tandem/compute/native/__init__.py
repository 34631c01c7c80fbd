"""Compiled CPU kernels: C++ in `src`, compiled on first use by `build`, called through `bindings`.

They keep the contract of `tandem.compute.ops` and promise more: a row's result is bit-identical whatever else is in the
call, and weights are read in place from the mapped file.
"""
