"""The published figures are floors: every peak reached, nothing else in the way. `IDEAL` says so."""

from dataclasses import replace

import pytest

from tandem.architecture.catalogue import catalogue_names, find_cost
from tandem.architecture.cost import read_cost
from tandem.architecture.draft_cost import DrafterCost
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.planning.roofline import IDEAL, TYPICAL, Assumptions, Roofline, kv_tokens, worker_speed
from tandem.planning.worker_facts import prefill_point

CHUNK = 2048


def roofline(shape: str = "qwen3-8b", hardware: str = "h100", num: int = 1, assumed: Assumptions = TYPICAL) -> Roofline:
    return Roofline(find_cost(shape), find_accelerator(hardware), num, assumed)


def test_prefill_of_40k_tokens_is_the_published_one() -> None:
    """0.76 s within 1 %: products at the 8-bit rate (1,979 TFLOP/s), causal attention at the 16-bit rate, and the head
    for the last token only.

    At 16 bits throughout it is 1.04 s: 0.56 s of products and 0.48 s of attention. The published figure is below that,
    and no other reading of the formula comes as near.
    """
    eight_bits = roofline(assumed=replace(IDEAL, products_8bit=True))
    assert eight_bits.prefill_ms(40_000) == pytest.approx(760, rel=0.01)
    whole = roofline(assumed=IDEAL)
    assert whole.prefill_ms(40_000) == pytest.approx(1040, rel=0.005)
    products = 2 * whole.model.num_multiplied_parameters * 40_000 / 989e12
    assert products == pytest.approx(0.562, abs=0.001)
    assert whole.model.attention_flops(40_000) / 989e12 == pytest.approx(0.477, abs=0.001)


def test_a_decode_step_after_40k_tokens_is_the_published_one() -> None:
    """22 GB swept (16.4 GB of weights at 16 bits and 5.9 GB of KV) in 6.6 ms, within 2 %."""
    floor = roofline(assumed=IDEAL)
    assert floor.step_bytes(1, 40_000) == pytest.approx(22e9, rel=0.02)
    assert floor.step_ms(1, 40_000) == pytest.approx(6.6, rel=0.02)


def test_a_dense_30b_decodes_at_the_published_rate() -> None:
    """18 ms a token and 56 tokens/s within 2 %: the weights alone, at 16 bits."""
    step_ms = roofline("dense-30b", assumed=IDEAL).step_ms(1, 1)
    assert step_ms == pytest.approx(18, rel=0.02)
    assert 1000 / step_ms == pytest.approx(56, rel=0.02)


def test_the_roof_bends_at_the_ridge() -> None:
    roof = roofline()
    ridge = roof.hardware.ridge
    assert roof.attainable_flops(ridge) == pytest.approx(989e12)
    assert roof.attainable_flops(2 * ridge) == pytest.approx(989e12)
    assert roof.attainable_flops(ridge / 2) == pytest.approx(989e12 / 2)


def test_a_short_prompt_waits_for_the_weights_and_a_long_one_for_compute() -> None:
    floor = roofline(assumed=IDEAL)
    assert floor.prefill_ms(1) == pytest.approx(1000 * 16.38e9 / 3.35e12, rel=0.001)
    assert floor.prefill_ms(16) == pytest.approx(floor.prefill_ms(1), rel=0.001)
    assert floor.prefill_ms(20_000) > 2 * floor.prefill_ms(10_000)


def test_cached_tokens_are_not_computed_but_are_attended_to() -> None:
    floor = roofline(assumed=IDEAL)
    alone, behind = floor.prefill_flops(2000), floor.prefill_flops(40_000, 38_000)
    assert behind - alone == pytest.approx(4 * 32 * 128 * 36 * 2000 * 38_000)
    assert floor.prefill_ms(40_000, 38_000) < floor.prefill_ms(40_000) / 10


def test_a_large_batch_is_bound_by_compute() -> None:
    floor = roofline(assumed=IDEAL)
    sweep_ms = floor.step_ms(1, 1)
    assert floor.step_ms(200, 1) == pytest.approx(sweep_ms, rel=0.01)
    assert floor.step_ms(3200, 1) == pytest.approx(1000 * 3200 * 2 * 7.568e9 / 989e12, rel=0.01)


@pytest.mark.parametrize("name", catalogue_names())
@pytest.mark.parametrize(("hardware", "num"), [("h100", 1), ("h100", 8), ("l4", 8), ("cpu", 1)])
def test_the_linear_speed_is_never_faster_than_the_roofline(name: str, hardware: str, num: int) -> None:
    """Batches up to 256, and prompts long enough to be bound by compute; for dense models hardly slower either."""
    roof = roofline(name, hardware, num)
    speed = roof.speed
    for prompt in (2000, 8000, 32_000, 64_000):
        if prefill_point(roof, prompt, prompt // 2).intensity < 2 * roof.hardware.ridge:
            model = roof.model  # whose weights are read though few tokens, or none, are multiplied by some
            assert model.num_expert_parameters or model.num_prompt_parameters < model.num_multiplied_parameters
            continue
        assert speed.prefill.prompt_ms(prompt, prompt // 2) >= 0.999 * roof.prefill_ms(prompt, prompt // 2)
    for running in (1, 16, 100, 256):
        assert speed.decode.step_ms(running, running * 4000) >= 0.999 * roof.step_ms(running, 4000)
    if not roof.model.num_expert_parameters and not roof.model.window_bytes:
        assert speed.prefill.prompt_ms(8000, 0) == pytest.approx(roof.prefill_ms(8000), rel=0.01)
        assert speed.decode.step_ms(1, 4000) == pytest.approx(roof.step_ms(1, 4000), rel=0.1)
        assert speed.decode.step_ms(256, 256 * 4000) == pytest.approx(roof.step_ms(256, 4000), rel=0.001)


def test_the_prior_of_a_planner_is_the_same_speed_and_room() -> None:
    shape, hardware = find_cost("llama-3-70b"), find_accelerator("h100")
    assert worker_speed(shape, hardware, num_accelerators=4) == roofline("llama-3-70b", num=4).speed
    assert kv_tokens(shape, hardware, num_accelerators=4) == roofline("llama-3-70b", num=4).kv_tokens


def test_kv_has_what_weights_and_reserve_leave() -> None:
    assert roofline(assumed=IDEAL).kv_tokens == int((80e9 - 16_380_854_272) / 147_456)
    assert kv_tokens(find_cost("qwen3-8b"), find_accelerator("h100")) == int((72e9 - 16_380_854_272) / 147_456)
    assert kv_tokens(find_cost("llama-3-70b"), find_accelerator("h100")) == 0
    assert roofline("llama-3-70b").max_running(1000) == 0


def test_the_largest_batch_within_a_step_time_is_exact() -> None:
    roof = roofline()
    most = roof.max_running_within(50, 4000)
    assert roof.step_ms(most, 4000) <= 50 < roof.step_ms(most + 1, 4000)
    assert roof.max_running_within(5, 4000) == 0
    assert roof.max_running(4000) == int(roof.kv_memory_bytes / (4000 * 147_456))


def test_split_layers_are_faster_by_less_than_their_number() -> None:
    one, four = roofline("qwen3-32b", "h200"), roofline("qwen3-32b", "h200", 4)
    assert 3 < one.prefill_ms(8000) / four.prefill_ms(8000) < 4
    assert 2 < one.step_ms(16, 4000) / four.step_ms(16, 4000) < 4
    without = replace(four, assumptions=replace(TYPICAL, all_reduce_ms=0.0))
    assert four.step_ms(16, 4000) - without.step_ms(16, 4000) == pytest.approx(2 * 64 * TYPICAL.all_reduce_ms)


def test_a_hand_off_hides_behind_prefill_but_for_the_last_chunk() -> None:
    roof, link = roofline(), find_link("rdma-400g")
    moved = roof.hand_off(40_000, 0, link, CHUNK)
    assert moved.num_bytes == 40_000 * 147_456
    assert moved.ms == pytest.approx(link.latency_ms + 1000 * 5.898e9 / 37.5e9, rel=0.001)
    assert moved.exposed_ms == pytest.approx(link.latency_ms + 1000 * CHUNK * 147_456 / 37.5e9)
    assert moved.exposed_share < 0.06


def test_a_hand_off_slower_than_prefill_is_exposed() -> None:
    roof, link = roofline(), find_link("tcp-10g")
    moved = roof.hand_off(40_000, 0, link, CHUNK)
    hidden_ms = roof.prefill_ms(40_000) - roof.prefill_ms(CHUNK)
    assert moved.exposed_ms == pytest.approx(moved.ms - hidden_ms)
    assert moved.exposed_share > 0.5
    short = roof.hand_off(100, 0, link, CHUNK)
    assert short.exposed_ms == short.ms


def test_what_prefill_had_cached_moves_while_the_rest_is_computed() -> None:
    roof, link = roofline(), find_link("rdma-100g")
    cached = roof.hand_off(8000, 6000, link, CHUNK)
    assert cached.exposed_ms == pytest.approx(
        max(link.latency_ms + 2000 * 147_456 / 9.375e6, cached.ms - roof.prefill_ms(8000, 6000))
    )


def test_a_constant_state_of_a_hand_off_hides_behind_nothing() -> None:
    roof, link = roofline("falcon-h1-7b"), find_link("rdma-100g")
    constant_ms = 1000 * roof.model.kv_bytes_per_request / link.usable_bytes_per_s
    moved = roof.hand_off(40_000, 0, link, CHUNK)
    growing_ms = moved.ms - link.latency_ms - constant_ms
    assert moved.exposed_ms == pytest.approx(link.latency_ms + constant_ms + growing_ms * CHUNK / 40_000)


def test_a_model_whose_tokens_keep_nothing_has_room_for_requests() -> None:
    config = {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64}
    roof = Roofline(read_cost(config, "mamba2"), find_accelerator("h100"), 1, TYPICAL)
    assert roof.model.kv_bytes_per_request == 64 * (128 * 64 * 128 * 4 + 3 * 10_240 * 2)
    assert (roof.kv_tokens, roof.max_running(10)) == (0, roof.max_running(1_000_000))
    assert roof.max_running(10) == int(roof.kv_memory_bytes / roof.model.kv_bytes_per_request)


def test_drafts_cost_their_guesses_and_the_rows_that_are_checked() -> None:
    """Acceptance 0.8 and a drafter of a tenth of the cost: four drafts bring 3.36 tokens for 1.4 steps, 2.4 times."""
    plain = roofline("qwen3-8b", assumed=IDEAL)
    tenth = DrafterCost(replace(plain.model, weight_bits=1.6, kv_bits=1.6))
    drafting = replace(plain, drafts=PlannedDrafts(drafter=tenth, acceptance=0.8, most=4))
    assert drafting.guess_ms(1, 100) == pytest.approx(plain.step_ms(1, 100) / 10)
    assert plain.step_ms(1, 100) / drafting.step_ms(1, 100) == pytest.approx(3.3616 / 1.4, rel=0.001)
    assert drafting.held_bytes(1000) == pytest.approx(1.1 * plain.held_bytes(1000))
    assert drafting.kv_memory_bytes == pytest.approx(plain.kv_memory_bytes - tenth.weight_bytes)


def test_drafts_that_do_not_pay_are_not_checked() -> None:
    plain = roofline("qwen3-8b")
    drafting = replace(plain, drafts=PlannedDrafts(drafter=None, acceptance=0.8, most=7))
    assert drafting.step_ms(1, 1000) < 0.4 * plain.step_ms(1, 1000)
    assert drafting.step_ms(4096, 1) == plain.step_ms(4096, 1)
