"""Checkpoints whose bfloat16 numbers take two thirds of their bytes, and have the same bits when they are read."""
