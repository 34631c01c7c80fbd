"""Draft lengths: chooses how many drafts of each request the next step verifies, for the most tokens per second.

Pure. Needs the time of a step by its number of rows (tokens that it computes), which `step_times` measures.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_GAIN = 1.03  # expected; less is not worth what the estimates may be wrong by
MAX_SLOWDOWN = 1.03  # expected, of the request that gains least
_LEAST_PROBABILITY = 0.02  # of a draft that any batch has room for


class Guess(NamedTuple):
    """Drafts for one request: their number, and the probability that each is right if all before it are."""

    num_tokens: int
    acceptance: float


def choose_lengths(
    guesses: Sequence[Guess], num_rows: int, seconds: Callable[[int], float], depth_s: float = 0.0
) -> list[int]:
    """Number of drafts of each request to verify in a step that has `num_rows` rows without drafts.

    A row that must be computed counts as one token, a draft as its probability of being accepted. Drafts are added in
    order of that, and as many are taken as give the most tokens per second; none unless that is `MIN_GAIN` times as
    many as without. No row may come to less than 1 / `MAX_SLOWDOWN` of its tokens per second without drafts, so that
    guessable answers are not made faster at the cost of others.

    Args:
        seconds: time of a step by its number of rows.
        depth_s: seconds that the drafter takes for one more token of every request; 0 = the drafts are made already.
    """
    ranked = sorted(
        (probability, -index, place)
        for index, guess in enumerate(guesses)
        for place in range(guess.num_tokens)
        if (probability := guess.acceptance ** (place + 1)) >= _LEAST_PROBABILITY
    )[::-1]
    lengths = [0] * len(guesses)
    expected = [1.0] * max(num_rows, len(guesses))  # tokens of each row
    plain_s = seconds(num_rows)
    best_rate, num_best = MIN_GAIN * num_rows / plain_s, 0
    num_tokens, depth = float(num_rows), 0
    for count, (probability, index, place) in enumerate(ranked, 1):
        num_tokens += probability
        expected[-index] += probability
        depth = max(depth, place + 1)
        step_s = seconds(num_rows + count) + depth * depth_s
        if num_tokens / step_s > best_rate and step_s <= MAX_SLOWDOWN * plain_s * min(expected):
            best_rate, num_best = num_tokens / step_s, count
    for _, index, _ in ranked[:num_best]:
        lengths[-index] += 1
    return lengths
