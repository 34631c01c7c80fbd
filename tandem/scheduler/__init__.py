"""What runs next. Deterministic: no tensors, no time, no I/O."""
