"""Capacity: more workers are never worse, more load never better, and decode follows Little's law."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.planning.capacity import DecodeCapacity, OfferedLoad, PrefillCapacity
from tandem.routing.speed import DecodeSpeed, PrefillSpeed

LOAD = OfferedLoad(requests_per_s=10.0, num_prompt_tokens=4000.0, num_missing_tokens=3000.0, num_output_tokens=200.0)
PREFILL = PrefillCapacity(PrefillSpeed(5.0, 0.05, 1e-6), 1.0, 0.95)
DECODE = DecodeCapacity(DecodeSpeed(8.0, 0.02, 6e-5), 400_000, 256, 1.0, 0.95)
RATES = st.floats(0.1, 100.0)


def test_service_counts_attention_over_what_is_cached() -> None:
    """3000 tokens over 1000 cached; attention of equal prompts, then of prompts that vary."""
    even = PrefillCapacity(PREFILL.speed, 0.0, 0.95)
    assert even.service_ms(LOAD) == pytest.approx(PREFILL.speed.prompt_ms(4000, 1000))
    assert PREFILL.service_ms(LOAD) - even.service_ms(LOAD) == pytest.approx(1e-6 * 3000**2 / 2)


def test_use_is_work_over_time() -> None:
    assert PREFILL.offered(LOAD) == pytest.approx(10.0 * PREFILL.service_ms(LOAD) / 1000)


def test_too_much_load_never_ends() -> None:
    heavy = replace(LOAD, requests_per_s=1e4)
    assert PREFILL.ttft_ms(4, PREFILL.offered(heavy), PREFILL.service_ms(heavy)) == math.inf
    assert DECODE.batch(4, heavy).tpot_ms == math.inf


def test_a_backlog_is_shared_by_the_workers() -> None:
    alone = PREFILL.ttft_ms(4, 2.0, 100.0)
    assert PREFILL.ttft_ms(4, 2.0, 100.0, backlog_ms=8000.0) == pytest.approx(alone + 2000.0)


def test_decode_is_a_fixed_point_of_littles_law() -> None:
    """Requests running = arrivals x tokens x the step that one more than those found makes."""
    batch = DECODE.batch(2, LOAD)
    step_ms = DECODE.speed.step_ms(batch.num_running + 1, (batch.num_running + 1) * LOAD.num_context_tokens)
    assert batch.num_running == pytest.approx(10.0 / 2 * 200.0 * step_ms / 1000)
    assert batch.tpot_ms > step_ms * 0.9


def test_kv_is_full_length_and_counts_prompts_on_their_way() -> None:
    batch, waiting = DECODE.batch(2, LOAD), DECODE.batch(2, LOAD, prefill_s=2.0)
    assert waiting.kv_use - batch.kv_use == pytest.approx(10.0 / 2 * 2.0 * 4200 / 400_000)


def test_slots_can_be_what_is_short() -> None:
    narrow = replace(DECODE, max_running=4, kv_tokens=0)
    batch = narrow.batch(2, LOAD)
    assert batch.kv_use == 0.0
    assert batch.use == batch.slot_use > 1


@given(RATES, st.integers(1, 40))
def test_one_worker_more_is_never_worse(rate: float, num: int) -> None:
    load = replace(LOAD, requests_per_s=rate)
    offered, service_ms = PREFILL.offered(load), PREFILL.service_ms(load)
    assert PREFILL.ttft_ms(num + 1, offered, service_ms) <= PREFILL.ttft_ms(num, offered, service_ms) + 1e-9
    fewer, more = DECODE.batch(num, load), DECODE.batch(num + 1, load)
    assert more.tpot_ms <= fewer.tpot_ms
    assert more.use <= fewer.use


@given(RATES, RATES, st.integers(1, 40))
def test_more_load_is_never_better(one: float, other: float, num: int) -> None:
    light, heavy = (replace(LOAD, requests_per_s=rate) for rate in sorted((one, other)))
    found = [PREFILL.ttft_ms(num, PREFILL.offered(load), PREFILL.service_ms(load)) for load in (light, heavy)]
    assert found[0] <= found[1] + 1e-9
    assert DECODE.batch(num, light).tpot_ms <= DECODE.batch(num, heavy).tpot_ms
