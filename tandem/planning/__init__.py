"""Computes the number of workers of each pool, with reasons, from observations. Reads no clock, does no I/O."""
