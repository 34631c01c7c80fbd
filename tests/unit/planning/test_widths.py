"""Search of widths: what ranks have and send, which pair is chosen, and what is said of the others."""

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.profile import draw_profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import DeploymentSite, Goals
from tandem.planning.widths import search_widths, width_facts
from tandem.workload.lengths import Fixed


def site_of(shape: str, prefill: int, decode: int) -> DeploymentSite:
    model, hardware = find_cost(shape), find_accelerator("h100")
    return DeploymentSite(
        prefill=Roofline(model, hardware, prefill),
        decode=Roofline(model, hardware, decode),
        link=find_link("rdma-400g"),
        profile=draw_profile(Fixed(2000), Fixed(300)),
        goals=Goals(ttft_ms=1000, tpot_ms=50),
    )


def test_ranks_have_shares_and_send_two_sums_a_layer_and_their_logits() -> None:
    """Llama 3 70B: 80 layers of 8,192, 8 KV heads, 128,256 tokens of which each rank has some."""
    cost = find_cost("llama-3-70b")
    one, two, eight = (width_facts(cost, width) for width in (1, 2, 8))
    assert (one.num_exchanges, one.exchanged_bytes_per_token) == (0, 0)
    assert (two.num_exchanges, eight.num_exchanges) == (161, 161)
    assert two.exchanged_bytes_per_token == 160 * 4 * 8192 + 4 * 64128
    assert two.kv_bytes_per_token * 2 == eight.kv_bytes_per_token * 8 == one.kv_bytes_per_token
    table = 2 * 128_256 * 8192  # the embedding, which every rank has
    assert two.weight_bytes == pytest.approx((one.weight_bytes - table) / 2 + table, rel=0.001)


def test_copies_are_counted() -> None:
    """Four KV heads on eight ranks; latents on any."""
    experts, latents = find_cost("qwen3-30b-a3b"), find_cost("deepseek-v3")
    assert width_facts(experts, 8).kv_bytes_per_token == width_facts(experts, 4).kv_bytes_per_token
    assert width_facts(latents, 4).kv_bytes_per_token == latents.kv_bytes_per_token
    assert width_facts(experts, 2).num_exchanges == 2 * 48 + 1, "of a layer attention's and the experts'"


def test_experts_lie_whole_on_ranks_and_more_tokens_make_them_more_even() -> None:
    four = width_facts(find_cost("qwen3-30b-a3b"), 4)
    assert four.experts == 32
    one, sixteen, many = four.expert_imbalance.values()
    assert 1.7 < one < 2.0, "of eight experts the rank with the most has nearly four"
    assert 1.0 < many < 1.1 < sixteen < 1.25
    assert width_facts(find_cost("llama-3-70b"), 4).experts is None


def test_the_cheapest_pair_that_holds_the_model_is_chosen_and_the_others_have_reasons() -> None:
    found = search_widths(lambda prefill, decode: site_of("llama-3-70b", prefill, decode), 2.0)
    assert (found.prefill, found.decode) == (2, 4)
    assert found.reason(prefill=2) == found.reason(decode=4) == "chosen"
    assert "cannot hold llama-3-70b" in found.reason(decode=1)
    assert found.reason(prefill=8).startswith("costs $")
    assert not found.refusals
    best = found.choices[found.prefill, found.decode]
    assert all(best.usd_per_hour <= each.usd_per_hour for each in found.choices.values() if not each.problems)


def test_widths_that_do_not_divide_the_model_are_left_out_with_the_reason() -> None:
    found = search_widths(lambda prefill, decode: site_of("phi-4", prefill, decode), 2.0)
    assert [each.width for each in found.facts] == [1, 2]
    assert "num_key_value_heads=10" in found.refusals[4]
    assert (found.prefill, found.decode) == (1, 1)
