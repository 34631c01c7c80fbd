"""Search of widths: what ranks have and send, which pair is chosen, and what is said of the others."""

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.group_size import GroupSize
from tandem.planning.group_size_search import (
    GroupSizeFacts,
    GroupSizeSearch,
    group_size_facts,
    search_group_sizes,
    sizes_of,
)
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.profile import draw_profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import DeploymentSite, Goals
from tandem.workload.lengths import Fixed


def site_of(shape: str, prefill: GroupSize, decode: GroupSize) -> DeploymentSite:
    model, hardware = find_cost(shape), find_accelerator("h100")
    return DeploymentSite(
        prefill=Roofline(model, hardware, prefill.num_ranks, num_stages=prefill.num_stages),
        decode=Roofline(model, hardware, decode.num_ranks, num_stages=decode.num_stages),
        link=find_link("rdma-400g"),
        profile=draw_profile(Fixed(2000), Fixed(300)),
        goals=Goals(ttft_ms=1000, tpot_ms=50),
    )


def search(shape: str, stages: tuple[int, ...] = (1,)) -> GroupSizeSearch:
    return search_group_sizes(lambda prefill, decode: site_of(shape, prefill, decode), 2.0, sizes_of(stages=stages))


def facts(shape: str, width: int, num_stages: int = 1) -> GroupSizeFacts:
    return group_size_facts(find_cost(shape), GroupSize(width, num_stages))


def test_ranks_have_shares_and_send_two_sums_a_layer_and_their_logits() -> None:
    """Llama 3 70B: 80 layers of 8,192, 8 KV heads, 128,256 tokens of which each rank has some."""
    one, two, eight = (facts("llama-3-70b", width) for width in (1, 2, 8))
    assert (one.num_exchanges, one.exchanged_bytes_per_token) == (0, 0)
    assert (two.num_exchanges, eight.num_exchanges) == (161, 161)
    assert two.exchanged_bytes_per_token == 160 * 4 * 8192 + 4 * 64128
    assert two.kv_bytes_per_token * 2 == eight.kv_bytes_per_token * 8 == one.kv_bytes_per_token
    table = 2 * 128_256 * 8192  # the embedding, which every rank has
    assert two.weight_bytes == pytest.approx((one.weight_bytes - table) / 2 + table, rel=0.001)


def test_copies_are_counted() -> None:
    """Four KV heads on eight ranks; latents on any."""
    experts, latents = "qwen3-30b-a3b", "deepseek-v3"
    assert facts(experts, 8).kv_bytes_per_token == facts(experts, 4).kv_bytes_per_token
    assert facts(latents, 4).kv_bytes_per_token == find_cost(latents).kv_bytes_per_token
    assert facts(experts, 2).num_exchanges == 2 * 48 + 1, "of a layer attention's and the experts'"


def test_experts_lie_whole_on_ranks_and_more_tokens_make_them_more_even() -> None:
    four = facts("qwen3-30b-a3b", 4)
    assert four.experts == 32
    one, sixteen, many = four.expert_imbalance.values()
    assert 1.7 < one < 2.0, "of eight experts the rank with the most has nearly four"
    assert 1.0 < many < 1.1 < sixteen < 1.25
    assert facts("llama-3-70b", 4).experts is None


def test_stages_divide_weights_and_state_and_send_the_residual_stream() -> None:
    """Llama 3 70B: of 80 layers each of four stages has 20; the first has the embedding, the last the head."""
    one, stages, both = (facts("llama-3-70b", *size) for size in ((1, 1), (1, 4), (2, 2)))
    table = 2 * 128_256 * 8192
    assert stages.weight_bytes == pytest.approx((one.weight_bytes - 2 * table) / 4 + table, rel=0.001)
    assert stages.kv_bytes_per_token * 4 == both.kv_bytes_per_token * 4 == one.kv_bytes_per_token
    assert (stages.num_exchanges, stages.exchanged_bytes_per_token) == (0, 0)
    assert both.num_exchanges == 161
    assert (one.stream_bytes_per_token, stages.stream_bytes_per_token) == (0, 2 * 8192)
    assert one.idle_share == dict.fromkeys(one.idle_share, 0.0)
    assert stages.idle_share == {1: 3 / 4, 16: 3 / 7, 64: 3 / 7, 512: 3 / 11}


def test_a_tied_head_is_counted_where_the_embedding_is_elsewhere() -> None:
    whole, halves = facts("qwen3-0.6b", 1), facts("qwen3-0.6b", 1, 2)
    table = 2 * 151_936 * 1024
    assert halves.weight_bytes == pytest.approx((whole.weight_bytes - table) / 2 + table, rel=0.001)


def test_the_cheapest_pair_that_holds_the_model_is_chosen_and_the_others_have_reasons() -> None:
    found = search("llama-3-70b")
    assert (found.prefill, found.decode) == (GroupSize(2), GroupSize(4))
    assert found.reason(prefill=GroupSize(2)) == found.reason(decode=GroupSize(4)) == "chosen"
    assert "cannot hold llama-3-70b" in found.reason(decode=GroupSize(1))
    assert found.reason(prefill=GroupSize(8)).startswith("costs $")
    assert not found.refusals
    best = found.choices[found.prefill, found.decode]
    assert all(best.usd_per_hour <= each.usd_per_hour for each in found.choices.values() if not each.problems)


def test_widths_that_do_not_divide_the_model_are_left_out_with_the_reason() -> None:
    found = search("phi-4")
    assert [each.size for each in found.facts] == [GroupSize(1), GroupSize(2)]
    assert "num_key_value_heads=10" in found.refusals[GroupSize(4)]
    assert (found.prefill, found.decode) == (GroupSize(), GroupSize())


def test_stages_are_searched_with_widths_and_told_apart_by_their_reasons() -> None:
    """Phi 4 has ten KV heads, which four ranks do not divide; four stages do. Stages wait in a decode step."""
    assert [str(size) for size in sizes_of((1, 2), (1, 2, 8))] == [
        "1",
        "1 x 2 stages",
        "2",
        "2 x 2 stages",
        "1 x 8 stages",
    ]
    found = search("phi-4", (1, 4))
    assert GroupSize(1, 4) in [each.size for each in found.facts]
    assert (found.prefill, found.decode) == (GroupSize(), GroupSize())
    assert found.reason(decode=GroupSize(1, 4)).startswith("costs $")


def test_one_request_passes_stages_one_after_the_other_and_a_prompt_fills_them() -> None:
    sizes = GroupSize(), GroupSize(2), GroupSize(1, 2), GroupSize(1, 8)
    one, wide, two, eight = (site_of("phi-4", GroupSize(), size).decode for size in sizes)
    assert wide.step_ms(1, 1000) < one.step_ms(1, 1000) < two.step_ms(1, 1000) < 1.02 * one.step_ms(1, 1000)
    assert 1.1 < two.step_ms(64, 1000) / one.step_ms(64, 1000) < 1.5, "both micro-batches read all weights"
    assert wide.prefill_ms(8000) < two.prefill_ms(8000) < 0.6 * one.prefill_ms(8000)
    assert eight.prefill_ms(8000) > one.prefill_ms(8000) / 7, "chunks of 2048 are too few pieces for eight stages"


def test_a_site_of_stages_alone_has_no_other_choice() -> None:
    found = search("llama-3-70b", (2,))
    assert {each.size.num_stages for each in found.facts} == {2}
    assert found.prefill.num_ranks >= 2
