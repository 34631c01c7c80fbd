"""Divides a machine's cores between workers, and parses lists of cores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import ConfigurationError, shown

_MIN_OWN_CORES = 2  # with fewer, a worker is not confined to its part


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's share of the cores: number of threads of its model, and the cores it is confined to (empty: any)."""

    num_threads: int
    cpus: tuple[int, ...] = ()


def own_cpus() -> Sequence[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def share_cores(
    cpus: Sequence[int], num_workers: int, *, num_threads: int | None = None, pin: bool = True
) -> list[Share]:
    """Gives each worker an equal part of `cpus`.

    A worker is confined to its part when that has two cores or more: on a single one, the model would stand in the way
    of the worker's own network threads.

    Args:
        num_threads: of each worker, instead of its part.
        pin: False = no worker is confined.
    """
    part = len(cpus) // num_workers
    is_pinned = pin and part >= _MIN_OWN_CORES
    return [
        Share(num_threads or max(1, part), tuple(cpus[i * part : (i + 1) * part]) if is_pinned else ())
        for i in range(num_workers)
    ]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parses a list of cores: `0-3,8` gives (0, 1, 2, 3, 8).

    Raises:
        ConfigurationError: the text is not such a list.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < 1 << 16:
            raise ConfigurationError(f"cpus={shown(text)} names no cores; use a list as 0-3,8, or auto, or any")
        cpus += range(int(first), int(last) + 1)
    return tuple(dict.fromkeys(cpus))
