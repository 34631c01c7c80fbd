"""Pairs requests with workers: pure functions over snapshots. No I/O; clock and randomness are arguments."""
