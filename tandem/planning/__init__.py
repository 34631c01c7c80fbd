"""How many workers of each pool, and why: pure functions of observations. Reads no clock, does no I/O."""
