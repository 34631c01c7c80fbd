"""Scheduler: chooses the requests and tokens of each step. Deterministic: no tensors, no time, no I/O."""
