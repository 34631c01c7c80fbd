"""Measurements, never tests: each run prints a table and one JSON line with git sha, configuration and hardware."""

import tandem  # noqa: F401  NOTE: before PyTorch, whose threads otherwise spin after each operation, as in no worker
