"""Locality index: the block hashes that workers hold, as hints for routing that may be stale without harm."""
