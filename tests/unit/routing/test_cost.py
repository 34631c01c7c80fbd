import pytest

from tandem.routing.candidates import Placement
from tandem.routing.cost import exposed_ms, predict, stall_ms
from tandem.routing.snapshot import Links, LinkState, Role
from tandem.routing.speed import PrefillWork
from tests.unit.routing.builders import FAST, LINK, queue_of, request, snapshot, worker

LINKS = Links(LINK)


def test_a_whole_prompt_is_priced_term_by_term() -> None:
    prefill = snapshot(worker("p", queued=queue_of(1000)))
    decode = snapshot(worker("d", Role.DECODE, num_running=4, num_context_tokens=8000))
    found = predict(request(2000, {"p": 25}), Placement(prefill, decode), LINKS, 0.0)
    assert found.queue_ms == pytest.approx(2 + 1000 * 0.05 + 500_000 * 1e-6)
    assert found.prefill_ms == pytest.approx(2 + 1600 * 0.05 + 1600 * (400 + 800) * 1e-6)
    assert found.transfer_ms == pytest.approx(0.5 + 32 * 1e6 / 10e9 * 1000)
    context_ms = 2050 * 5e-5
    assert found.decode_ms == pytest.approx(100 * (5 + 5 * 0.05 + 8000 * 5e-5 + context_ms))
    assert found.slowdown_ms == pytest.approx(100 * 4 * (0.05 + context_ms))
    assert found.staleness_ms == 0
    assert found.ttft_ms == found.queue_ms + found.prefill_ms


def test_a_queue_drains_while_nothing_is_heard() -> None:
    waiting = snapshot(worker("p", queued=queue_of(1000)))
    assert waiting.wait_ms(0.02) == pytest.approx(waiting.wait_ms(0.0) - 20)
    assert waiting.wait_ms(100.0) == 0


def test_a_fetch_hides_behind_the_queue() -> None:
    shape = request(2000, {"h": 124})
    holder, decode = snapshot(worker("h")), snapshot(worker("d", Role.DECODE))
    idle = predict(shape, Placement(snapshot(worker("p")), decode, holder), LINKS, 0.0)
    busy = predict(shape, Placement(snapshot(worker("p", queued=queue_of(1000))), decode, holder), LINKS, 0.0)
    assert idle.fetch_ms == pytest.approx(LINK.ms(124 * 1_000_000))
    assert busy.fetch_ms == 0
    assert idle.prefill_ms == busy.prefill_ms == pytest.approx(FAST.prefill.prompt_ms(2000, 124 * 16))


def test_a_link_slower_than_prefill_shows_its_whole_excess() -> None:
    prefill, decode = snapshot(worker("p")), snapshot(worker("d", Role.DECODE))
    slow = LinkState(1e8, 0.0)
    whole_ms = 125 * 1_000_000 / 1e8 * 1000
    assert exposed_ms(request(2000), prefill, decode, slow, prefill_ms=100.0) == pytest.approx(whole_ms - 100)
    assert exposed_ms(request(2000), prefill, decode, LINK, prefill_ms=100.0) == pytest.approx(LINK.ms(32_000_000))


def test_a_constant_state_follows_the_prompt_over_the_same_link() -> None:
    """So a short prompt of a hybrid is computed by the decode worker, and a long one is not."""
    prefill = snapshot(worker("p", request_bytes=100_000_000))
    decode = snapshot(worker("d", Role.DECODE, request_bytes=100_000_000))
    assert exposed_ms(request(100), prefill, decode, LINK, 1e6) == pytest.approx(LINK.ms(107_000_000))
    slow = LinkState(1e8, 0.0)
    assert exposed_ms(request(2000), prefill, decode, slow, 100.0) == pytest.approx(slow.ms(225_000_000) - 100)
    busy = snapshot(worker("d", Role.DECODE, request_bytes=100_000_000, num_running=2))
    costs = {
        num_tokens: [predict(request(num_tokens), Placement(at, busy), LINKS, 0.0).total_ms for at in (None, prefill)]
        for num_tokens in (100, 8000)
    }
    assert costs[100][0] < costs[100][1]
    assert costs[8000][0] > costs[8000][1]
    holder = snapshot(worker("h"))
    fetched = predict(request(2000, {"h": 124}), Placement(prefill, decode, holder), LINKS, 0.0)
    assert fetched.fetch_ms == pytest.approx(LINK.ms(224_000_000))


def test_what_decode_holds_is_not_sent() -> None:
    prefill, decode = snapshot(worker("p")), snapshot(worker("d", Role.DECODE))
    assert exposed_ms(request(2000, {"d": 124}), prefill, decode, LINK, 100.0) == pytest.approx(LINK.ms(1_000_000))


def test_a_local_prefill_stalls_the_batch() -> None:
    idle = predict(request(100), Placement(None, snapshot(worker("d", Role.DECODE))), LINKS, 0.0)
    busy_decode = snapshot(worker("d", Role.DECODE, num_running=10))
    busy = predict(request(100), Placement(None, busy_decode), LINKS, 0.0)
    assert idle.transfer_ms == busy.transfer_ms == 0
    joining_ms = 100 * 10 * (0.05 + 150 * 5e-5)
    assert busy.slowdown_ms - joining_ms == pytest.approx(10 * (idle.prefill_ms - FAST.prefill.ms_per_request))


def test_the_last_token_is_always_computed() -> None:
    found = predict(request(32, {"d": 2}), Placement(None, snapshot(worker("d", Role.DECODE))), LINKS, 0.0)
    assert found.prefill_ms == pytest.approx(FAST.prefill.ms(PrefillWork.of(32, 16)))


def test_an_old_report_costs_its_age() -> None:
    old = snapshot(worker("d", Role.DECODE))
    found = predict(request(), Placement(snapshot(worker("p", reported_at_s=1.0)), old), LINKS, 1.5)
    assert found.staleness_ms == pytest.approx(750)


def test_those_who_wait_for_their_kv_are_not_delayed_by_a_prompt() -> None:
    """A prompt computed by decode was thought to delay requests whose own prompts another worker still computed."""
    busy = snapshot(worker("d0", Role.DECODE, num_running=5))
    waiting = snapshot(worker("d0", Role.DECODE, num_running=5, num_awaiting_kv=4))
    assert stall_ms(waiting, 100.0) == pytest.approx(stall_ms(busy, 100.0) / 5)
