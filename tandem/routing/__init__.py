"""Who serves a request: pure functions over snapshots. No I/O; the clock and randomness are arguments."""
