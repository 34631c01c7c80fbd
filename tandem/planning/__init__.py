"""Computes how many workers each pool should have, with reasons, and plans deployments. Reads no clock, does no I/O."""
