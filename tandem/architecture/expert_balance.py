"""Balance of the ranks of a worker whose experts lie whole on them, where every expert is chosen as often."""

from bisect import bisect_right
from collections import Counter
from random import Random

from tandem.architecture.feed_forward import RoutedExperts

_NUM_TRIALS = 100


def expected_imbalance(routed: RoutedExperts, bounds: tuple[int, ...], num_tokens: int) -> float:
    """Mean of `ExpertRows.imbalance` over steps of so many tokens, whose choices are independent and even; sampled, the
    same in every call. Trained routers are less even, and tokens of one text choose alike.

    Args:
        bounds: rank i has experts `bounds[i]` to `bounds[i + 1] - 1`.
    """
    random, experts, inner = Random(0), range(routed.num_experts), bounds[1:-1]
    owners = [bisect_right(inner, expert) for expert in experts]
    busiest = 0
    for _ in range(_NUM_TRIALS):
        rows: Counter[int] = Counter()
        for _ in range(num_tokens):
            rows.update(owners[expert] for expert in random.sample(experts, routed.top_k))
        busiest += max(rows.values())
    return busiest * (len(bounds) - 1) / (_NUM_TRIALS * num_tokens * routed.top_k)
