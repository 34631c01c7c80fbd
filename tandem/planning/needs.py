"""The fewest workers that satisfy every named need. Pure: a need is a question about a count."""

from collections.abc import Callable, Mapping, Sequence

MAX_WORKERS = 1 << 14

Need = Callable[[int], bool]
Needs = Mapping[str, Need]


def largest_need(needs: Needs) -> tuple[int, str, Sequence[str]]:
    """The fewest workers that satisfy all, the need that asks for most of them, and, in words, those that no count up
    to `MAX_WORKERS` satisfies; these do not count, but where there is no other, the answer is `MAX_WORKERS`.
    More workers never make a need worse.
    """
    counts = {name: fewest(need) for name, need in needs.items()}
    known = {name: count for name, count in counts.items() if count is not None} or dict.fromkeys(needs, MAX_WORKERS)
    unmet = [f"{name}: {MAX_WORKERS:,} workers do not suffice" for name, count in counts.items() if count is None]
    name = max(known, key=lambda name: known[name])
    return (known[name], name if known[name] > 1 else "one is enough", unmet)


def fewest(suffices: Need) -> int | None:
    """The smallest count that does, one more never being worse; None where `MAX_WORKERS` do not."""
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
