"""Which worker holds which block hashes: hints for routing, which may be stale and never corrupt anything."""
