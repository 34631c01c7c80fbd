"""Moves the bytes of KV blocks between workers: registers memory, reads, polls. No retry policy, no tokens."""
