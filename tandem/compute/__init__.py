"""The decoder's arithmetic and attention, over the arena that holds K and V; it decides nothing.

`ops` and `attention` are the seams; `torch`, `native` and `cuda` implement them for any device, CPUs and NVIDIA GPUs.
"""
