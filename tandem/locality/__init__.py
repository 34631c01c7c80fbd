"""Index of the block hashes that workers hold: hints for routing, which may be stale and corrupt nothing."""
