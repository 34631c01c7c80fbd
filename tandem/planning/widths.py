"""Search of how many ranks a worker of each pool should have: what each width costs in bytes and exchanges, which pair
of widths is the cheapest that meets the objectives, and why the others are not chosen.

A rank is an accelerator. What it keeps is counted from its part of the model (`architecture.shards`): of weights that
ranks do not divide each has a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tandem.architecture.cost import ModelCost
from tandem.architecture.exchange_cost import exchange_bytes
from tandem.architecture.expert_balance import expected_imbalance
from tandem.architecture.shards import WIDTHS, expert_bounds, shard_model
from tandem.core.errors import ConfigurationError
from tandem.planning.pool_sizing import size_pools
from tandem.planning.sizing import DeploymentSite, Sizing

STEP_TOKENS = 1, 16, 64
_ANY_DTYPE = "bfloat16"  # NOTE: shares of bytes do not depend on it
Choices = dict[tuple[int, int], Sizing]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthFacts:
    """What each rank of so many has and sends.

    Args:
        weight_bytes: of the rank with the most.
        kv_bytes_per_token: that a rank keeps.
        num_exchanges, exchanged_bytes_per_token: of one step, see `exchange_bytes`.
        experts: whole ones of a layer that the rank with the most has; None = there are none.
        expert_imbalance: by tokens of a step, see `expected_imbalance`.
    """

    width: int
    weight_bytes: float
    kv_bytes_per_token: float
    num_exchanges: int
    exchanged_bytes_per_token: float
    experts: int | None
    expert_imbalance: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class WidthSearch:
    """What was found.

    facts: of the widths that divide the model.
    refusals: of the others, the reason.
    prefill, decode: the widths chosen.
    choices: by widths of prefill and decode.
    """

    facts: Sequence[WidthFacts]
    refusals: dict[int, str]
    prefill: int
    decode: int
    choices: Choices

    def reason(self, *, prefill: int | None = None, decode: int | None = None) -> str:
        """Why the chosen widths were better than those with this one for one of the pools."""
        best = self.choices[self.prefill, self.decode]
        found = self.choices[prefill or self.prefill, decode or self.decode]
        if found is best:
            return "chosen"
        if found.problems:
            return found.problems[0]
        more = found.usd_per_hour - best.usd_per_hour
        if abs(more) < 0.005:
            return "costs as much, with more ranks or longer first tokens"
        return f"costs ${more:,.2f} an hour more"


def search_widths(site_of: Callable[[int, int], DeploymentSite], rate_per_s: float) -> WidthSearch:
    """The widths of both pools with which the fewest objectives are missed, for the least money.

    Args:
        site_of: the site with so many ranks a prefill and a decode worker.
    """
    cost = site_of(1, 1).prefill.model
    facts, refusals = [], {}
    for width in WIDTHS:
        try:
            facts.append(width_facts(cost, width))
        except ConfigurationError as error:
            refusals[width] = str(error)
    widths = [each.width for each in facts]
    choices = {(p, d): size_pools(site_of(p, d), rate_per_s) for p in widths for d in widths}
    prefill, decode = min(choices, key=lambda pair: _order(choices[pair], pair))
    return WidthSearch(facts, refusals, prefill, decode, choices)


def width_facts(cost: ModelCost, width: int) -> WidthFacts:
    """Counted from the parts of all ranks. Raises `ConfigurationError` where the model has no such parts."""
    model = replace(cost.model, dtype=_ANY_DTYPE)
    shards = [shard_model(model, rank, width) for rank in range(width)]
    whole = sum(tensor.size for tensor in model.tensors())
    largest = max(sum(tensor.size for tensor in shard.tensors()) for shard in shards)
    state = sum(spec.bytes_per_token for spec in model.kv_specs)
    kept = sum(spec.bytes_per_token for spec in shards[0].kv_specs)
    exchanged = exchange_bytes(shards[0], width)
    routed = next((layer.routed for layer in model.layers if layer.routed is not None), None)
    bounds = expert_bounds(routed.num_experts, width) if routed is not None else ()
    return WidthFacts(
        width=width,
        weight_bytes=cost.weight_bytes * largest / whole,
        kv_bytes_per_token=cost.kv_bytes_per_token * kept / state if state else 0.0,
        num_exchanges=len(exchanged),
        exchanged_bytes_per_token=sum(exchanged),
        experts=None if routed is None else max(end - first for first, end in pairwise(bounds)),
        expert_imbalance={} if routed is None else {n: expected_imbalance(routed, bounds, n) for n in STEP_TOKENS},
    )


def _order(sizing: Sizing, widths: tuple[int, int]) -> tuple[float, ...]:
    cost = round(sizing.usd_per_hour, 2)
    return len(sizing.problems), cost, sizing.num_accelerators, sum(widths), sizing.ttft.high_ms
