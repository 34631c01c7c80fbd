"""Lossless compression of checkpoints: bfloat16 numbers take two thirds of their bytes and keep every bit."""
