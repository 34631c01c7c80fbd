"""Smallest number of workers that satisfies every named need. Pure: a need is a predicate on the number of workers."""

from collections.abc import Callable, Mapping, Sequence

MAX_WORKERS = 1 << 14  # that are tried

Need = Callable[[int], bool]
Needs = Mapping[str, Need]


def largest_need(needs: Needs) -> tuple[int, str, Sequence[str]]:
    """(Fewest workers that satisfy all needs, the name of the need that requires most, messages on unmet needs).

    Needs that no count up to `MAX_WORKERS` satisfies are unmet and otherwise ignored; if all are unmet, the count is
    `MAX_WORKERS`. A need satisfied by one count must be satisfied by every larger one.
    """
    counts = {name: fewest(need) for name, need in needs.items()}
    known = {name: count for name, count in counts.items() if count is not None} or dict.fromkeys(needs, MAX_WORKERS)
    unmet = [f"{name}: {MAX_WORKERS:,} workers do not suffice" for name, count in counts.items() if count is None]
    name = max(known, key=lambda name: known[name])
    return (known[name], name if known[name] > 1 else "one is enough", unmet)


def fewest(suffices: Need) -> int | None:
    """Smallest count up to `MAX_WORKERS` that suffices, or None. `suffices` must be monotonic."""
    high = 1
    while not suffices(high):
        high *= 2
        if high > MAX_WORKERS:
            return None
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return high
