"""Balance of load among ranks that divide the experts of a layer, if the router chooses all experts equally often."""

from bisect import bisect_right
from collections import Counter
from random import Random

from tandem.architecture.feed_forward import RoutedExperts

_NUM_TRIALS = 100


def expected_imbalance(routed: RoutedExperts, bounds: tuple[int, ...], num_tokens: int) -> float:
    """Expected ratio of the busiest rank's load to the mean (`ExpertRows.imbalance`) over steps of `num_tokens` tokens,
    if choices of experts are independent and even. Sampled with a fixed seed. Trained routers are less even, and tokens
    of one text choose alike.

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
