"""Measurements, never tests: each run prints a table and one JSON line with git sha, configuration and hardware."""
