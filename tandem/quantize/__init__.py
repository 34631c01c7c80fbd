"""Quantiser: makes a checkpoint whose linear maps have low-bit weights (codes and scales). `run` is the main module."""
