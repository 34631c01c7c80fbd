import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.hardware import find_accelerator
from tandem.planning.profile import draw_profile
from tandem.planning.roofline import IDEAL, Roofline
from tandem.planning.sizing import Goals
from tandem.planning.worker_facts import decode_point, prefill_point, worker_facts
from tandem.workload.lengths import Fixed

H100 = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))


def test_the_published_example_is_what_a_report_shows() -> None:
    facts = worker_facts(H100, draw_profile(Fixed(40_000), Fixed(500)), Goals(ttft_ms=3000, tpot_ms=50))
    assert facts.prompt_tokens == 40_000
    assert facts.prompt_kv_bytes == pytest.approx(6e9, rel=0.02)
    assert facts.prefill_floor_ms == pytest.approx(1040, rel=0.005)
    assert facts.step_bytes == pytest.approx(22e9, rel=0.02)
    assert facts.step_floor_ms == pytest.approx(6.6, rel=0.02)
    assert facts.tokens_per_s == pytest.approx(150, rel=0.02)
    assert facts.prefill_ms > facts.prefill_floor_ms
    assert facts.step_ms > facts.step_floor_ms


def test_the_link_that_beats_computing_a_prefix_is_near_the_published_one() -> None:
    """Mooncake: about 6 GB/s for a 70B model on 8 A800, which compute as an A100 does. 5.8 of the products alone; our
    floor of 4.5 also has attention and the sums over eight accelerators.
    """
    eight = Roofline(find_cost("llama-3-70b"), find_accelerator("a100"), 8, IDEAL)
    facts = worker_facts(eight, draw_profile(Fixed(4000), Fixed(1)), Goals(ttft_ms=1, tpot_ms=1))
    assert facts.kv_bytes_per_s == pytest.approx(6e9, rel=0.25)
    products_s = 2 * eight.model.num_multiplied_parameters * 4000 / eight.flops
    assert facts.prompt_kv_bytes / products_s == pytest.approx(6e9, rel=0.05)


def test_points_lie_under_the_roof_on_either_side_of_the_ridge() -> None:
    prefill, decode = prefill_point(H100, 8000), decode_point(H100, 8, 8000)
    assert decode.intensity < 20 < H100.hardware.ridge < prefill.intensity
    for point in (prefill, decode):
        assert 0.4 < point.flops / H100.attainable_flops(point.intensity) < 0.9


def test_a_larger_batch_lies_further_up() -> None:
    few, many = decode_point(H100, 1, 2000), decode_point(H100, 64, 2000)
    assert many.intensity > 10 * few.intensity
    assert many.flops > 10 * few.flops
