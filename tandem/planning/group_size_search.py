"""Searches the parallelism (ranks per layer, pipeline stages) of both pools' workers, for the sizing command.

Finds the cheapest pair of sizes that meets the objectives. Reports what each size costs in memory, traffic and idle
time, and why it was not chosen. A rank is an accelerator; its memory is counted from its part of the model
(`architecture.shards`), with a copy of weights that ranks do not divide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tandem.architecture.cost import ModelCost
from tandem.architecture.exchange_cost import exchange_bytes
from tandem.architecture.expert_balance import expected_imbalance
from tandem.architecture.shards import WIDTHS, expert_bounds, shard_model
from tandem.architecture.stages import idle_share, num_elements, stage_of
from tandem.architecture.tensors import MAX_RANKS
from tandem.core.errors import ConfigurationError
from tandem.planning.group_size import GroupSize
from tandem.planning.pool_sizing import size_pools
from tandem.planning.sizing import DeploymentSite, Sizing

STEP_TOKENS = 1, 16, 64  # numbers of tokens in a decode step that are reported
CHUNK_TOKENS = 512  # of a prompt in one step, as on a CPU
_STREAM_BYTES = 2.0  # of a number of the residual stream
_ANY_DTYPE = "bfloat16"  # NOTE: shares of bytes do not depend on it
Choices = dict[tuple[GroupSize, GroupSize], Sizing]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizeFacts:
    """Memory, traffic and idle time of each rank of a group.

    Args:
        weight_bytes, kv_bytes_per_token: of the rank that has most.
        num_exchanges, exchanged_bytes_per_token: exchanges among the ranks of a layer in one step, all stages together,
            and the bytes that a rank sends in them for each token.
        stream_bytes_per_token: bytes that a rank sends to the next stage.
        idle_share: share of time that a rank waits for other stages, by tokens of a step; 0 with one stage.
        experts: largest number of whole experts of a layer on any rank; None = there are none.
        expert_imbalance: expected work of the rank that gets most rows of experts, as a multiple of an even share, by
            tokens of a step; 1 = even.
    """

    size: GroupSize
    weight_bytes: float
    kv_bytes_per_token: float
    num_exchanges: int
    exchanged_bytes_per_token: float
    stream_bytes_per_token: float
    idle_share: Mapping[int, float]
    experts: int | None
    expert_imbalance: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class GroupSizeSearch:
    """Result of a search over group sizes.

    Args:
        facts: for each size into which the model can be divided.
        refusals: reasons why other sizes are not possible.
        prefill, decode: the sizes chosen.
        choices: sizing of the pools, by the sizes of prefill and decode workers.
    """

    facts: Sequence[GroupSizeFacts]
    refusals: dict[GroupSize, str]
    prefill: GroupSize
    decode: GroupSize
    choices: Choices

    def reason(self, *, prefill: GroupSize | None = None, decode: GroupSize | None = None) -> str:
        """Reason why this size was not chosen for one of the pools. Raises KeyError for a refused size."""
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


def sizes_of(widths: Sequence[int] = WIDTHS, stages: Sequence[int] = (1,)) -> Sequence[GroupSize]:
    """All group sizes of these numbers of ranks per layer and of stages that a worker may have."""
    sizes = (GroupSize(width, num_stages) for width in widths for num_stages in stages)
    return sorted((size for size in sizes if size.num_ranks <= MAX_RANKS), key=lambda size: (size.num_ranks, size))


def search_group_sizes(
    site_of: Callable[[GroupSize, GroupSize], DeploymentSite], rate_per_s: float, sizes: Sequence[GroupSize]
) -> GroupSizeSearch:
    """Finds the pair of sizes that misses the fewest objectives; among these, the cheapest.

    Args:
        rate_per_s: requests per second.
        site_of: the site with prefill and decode workers of these sizes.

    Raises:
        ConfigurationError: none of them divides the model.
    """
    cost = site_of(GroupSize(), GroupSize()).prefill.model
    facts, refusals = [], {}
    for size in sizes:
        try:
            facts.append(group_size_facts(cost, size))
        except ConfigurationError as error:
            refusals[size] = str(error)
    if not facts:
        raise ConfigurationError("; ".join(dict.fromkeys(refusals.values())))
    divide = [each.size for each in facts]
    choices = {(p, d): size_pools(site_of(p, d), rate_per_s) for p in divide for d in divide}
    prefill, decode = min(choices, key=lambda pair: _order(choices[pair], pair))
    return GroupSizeSearch(facts, refusals, prefill, decode, choices)


def group_size_facts(cost: ModelCost, size: GroupSize) -> GroupSizeFacts:
    """Computes the facts from the parts of all ranks. Raises `ConfigurationError` if the model cannot be divided so."""
    model, width, num_stages = replace(cost.model, dtype=_ANY_DTYPE), size.width, size.num_stages
    shards = [shard_model(model, rank, width) for rank in range(width)]
    parts = [stage_of(shard, stage, num_stages) for shard in shards for stage in range(num_stages)]
    whole = sum(tensor.size for tensor in model.tensors())
    state = sum(spec.bytes_per_token for spec in model.kv_specs)
    kept = max(sum(spec.bytes_per_token for spec in part.kv_specs) for part in parts)
    exchanged = exchange_bytes(shards[0], width)
    routed = next((layer.routed for layer in model.layers if layer.routed is not None), None)
    bounds = expert_bounds(routed.num_experts, width) if routed is not None else ()
    return GroupSizeFacts(
        size=size,
        weight_bytes=cost.weight_bytes * max(map(num_elements, parts)) / whole,
        kv_bytes_per_token=cost.kv_bytes_per_token * kept / state if state else 0.0,
        num_exchanges=len(exchanged),
        exchanged_bytes_per_token=sum(exchanged),
        stream_bytes_per_token=0.0 if num_stages == 1 else _STREAM_BYTES * model.stream_size,
        idle_share={num_tokens: idle_share(num_tokens, num_stages) for num_tokens in (*STEP_TOKENS, CHUNK_TOKENS)},
        experts=None if routed is None else max(end - first for first, end in pairwise(bounds)),
        expert_imbalance={} if routed is None else {n: expected_imbalance(routed, bounds, n) for n in STEP_TOKENS},
    )


def _order(sizing: Sizing, sizes: tuple[GroupSize, GroupSize]) -> tuple[float, ...]:
    """Sort key of a choice: fewer problems, then lower cost, then fewer accelerators, ranks, lower TTFT and fewer
    stages.
    """
    cost, (prefill, decode) = round(sizing.usd_per_hour, 2), sizes
    num_ranks, num_stages = prefill.num_ranks + decode.num_ranks, prefill.num_stages + decode.num_stages
    return len(sizing.problems), cost, sizing.num_accelerators, num_ranks, sizing.ttft.high_ms, num_stages
