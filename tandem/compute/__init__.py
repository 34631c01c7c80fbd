"""Arithmetic and attention of the decoder, on tensors and on the KV cache's memory (the arena). It makes no decisions
about requests.

`ops` and `attention` define the interfaces; `torch`, `native` and `cuda` implement them for any device, CPUs and NVIDIA
GPUs.
"""
