"""Pairs requests with workers: decisions over snapshots of the fleet. No I/O; clock and randomness are arguments."""
