"""Floors, against sums done by hand."""

import pytest

from bench.race.work import ModelCost, Rates, Span, Work
from bench.race.workloads import WORKLOADS, Batch, Conversations

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
# q and o 8x8 each, k and v 8x4 each, three of 8x16
LAYER = 64 + 64 + 32 + 32 + 3 * 128
HEAD = 32 * 8
UNASKED = LAYER - 64  # but k and v
KV_BYTES = 2 * 2 * 2 * 2 * 2  # bytes, layers, K and V, heads, width


def test_weights_are_two_bytes_each() -> None:
    assert ModelCost(SIZES).weight_bytes == 2 * (2 * LAYER + HEAD)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_of_experts_all_are_held_and_those_of_one_token_read(key: str) -> None:
    """Beside attention each layer has a router of 8x6 and six experts of three matrices of 8x4."""
    cost = ModelCost(SIZES | {key: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
    beside, expert = LAYER - 3 * 128 + 48, 3 * 32
    assert cost.weight_bytes == 2 * (2 * (beside + 6 * expert) + HEAD)
    step = 2 * (2 * (beside + 2 * expert) + HEAD)
    assert cost.read_bytes(Work((), (Span(0, 1),) * 3, num_steps=1)) == step + KV_BYTES * 3 / 2
    assert cost.flops(Work((), (Span(0, 1),), 1)) == step + 4 * 2 * 8 / 2


def test_a_prompt_costs_its_products_and_its_attention() -> None:
    work = Work((Span(0, 10),), (), 0)
    # scores and values: 4 FLOP for each of 8 query elements and each pair; 50 pairs, 40.5 of them of the first 9 tokens
    products = 2 * (2 * LAYER * 10 - UNASKED * 9)
    assert ModelCost(SIZES).flops(work) == products + 4 * 8 * (2 * 50 - 40.5) + 2 * HEAD


def test_a_cached_prefix_costs_attention_only() -> None:
    cost = ModelCost(SIZES)
    whole, prefix = Work((Span(0, 10),), (), 0), Work((Span(0, 6),), (), 0)
    last_of_prefix = 2 * UNASKED + 4 * 8 * (6**2 - 5**2) / 2 + 2 * HEAD  # whose hidden state is asked for by one alone
    assert cost.flops(Work((Span(6, 10),), (), 0)) == cost.flops(whole) - cost.flops(prefix) + last_of_prefix


def test_a_step_reads_the_weights_once_and_each_context() -> None:
    cost = ModelCost(SIZES)
    work = Work((), (Span(10, 14), Span(10, 14)), num_steps=4)
    assert cost.read_bytes(work) == 4 * cost.weight_bytes + KV_BYTES * 2 * (14**2 - 10**2) / 2


def test_the_floor_is_whichever_is_slower() -> None:
    cost, work = ModelCost(SIZES), Work((Span(0, 10),), (Span(10, 14),), num_steps=4)
    by_reads = cost.floor_s(work, Rates(read_bandwidth=1.0, matmul=1e12))
    by_products = cost.floor_s(work, Rates(read_bandwidth=1e12, matmul=1.0))
    assert by_reads == cost.read_bytes(work)
    assert by_products == cost.flops(work)
    assert cost.decode_floor_s(work, Rates(2.0, 1.0)) == cost.read_bytes(work) / 8


def test_a_shared_prefix_is_computed_once() -> None:
    work = Batch("x", "x", num_requests=3, concurrency=2, own=4, output=5, shared=10).work()
    assert work.prefills == (Span(0, 10), Span(10, 14), Span(10, 14), Span(10, 14))
    assert work.decodes == (Span(14, 18),) * 3
    assert work.num_steps == 2 * 4


def test_a_conversation_computes_only_what_is_new() -> None:
    work = Conversations("x", "x", users=1, turns=2, first=10, later=3, output=4).work()
    assert work.prefills == (Span(0, 10), Span(13, 17))
    assert work.decodes == (Span(10, 13), Span(17, 20))
    assert work.num_steps == 6


def test_every_workload_of_the_race_has_a_floor_or_none_by_choice() -> None:
    without = {workload.key for workload in WORKLOADS if workload.work() is None}
    assert without == {"burst"}
    for workload in WORKLOADS:
        work = workload.work()
        if work is not None:
            assert ModelCost(SIZES).floor_s(work, Rates(1e9, 1e9)) == pytest.approx(
                max(ModelCost(SIZES).flops(work), ModelCost(SIZES).read_bytes(work)) / 1e9
            )
