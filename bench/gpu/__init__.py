"""Benchmark of Tandem on one NVIDIA GPU: `python -m bench.gpu`. See docs/gpu.md.

Correctness of every CUDA path first, then speed beside what the hardware could do. Every part runs in a process of its
own with a time limit and leaves its results on disk as they come, so no failure takes others with it.
"""
