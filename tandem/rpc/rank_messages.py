"""Ranks of a worker, as its status tells them. Values only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankReport:
    """Processes among which a worker's model is divided.

    pids: by rank; the first is the worker's own.
    num_epochs: how often the group was formed.
    """

    pids: tuple[int, ...]
    num_epochs: int
