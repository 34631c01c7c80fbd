from typing import Any

import pytest

from tandem.routing.admission import AdmissionLimits
from tandem.routing.candidates import Placement, WorkerSnapshot
from tandem.routing.fleet import Fleet
from tandem.routing.snapshot import Links, Role
from tests.unit.routing.builders import LINK, SPEEDS, queue_of, request, worker


def fleet_of(*ids: str, limits: AdmissionLimits | None = None) -> Fleet:
    fleet = Fleet(limits or AdmissionLimits(), Links(LINK), SPEEDS.__getitem__)
    for worker_id in ids:
        fleet.report(worker(worker_id, Role.PREFILL if worker_id.startswith("p") else Role.DECODE))
    return fleet


def known(fleet: Fleet, worker_id: str) -> WorkerSnapshot:
    found = fleet.snapshot(worker_id)
    assert found is not None
    return found


def send(fleet: Fleet, request_id: str, now_s: float) -> None:
    fleet.sent(request(2000, request_id=request_id), Placement(known(fleet, "p"), known(fleet, "d")), now_s)


def test_what_was_just_sent_is_counted_at_both_workers() -> None:
    fleet = fleet_of("p", "d")
    send(fleet, "a", 1.0)
    prefill, decode = known(fleet, "p"), known(fleet, "d")
    assert prefill.queued == queue_of(2000)
    assert prefill.wait_ms(1.0) == pytest.approx(prefill.speed.prefill.prompt_ms(2000, 0))
    assert (decode.num_running, decode.num_context_tokens) == (1, 2000)
    assert decode.num_free_blocks == 10_000 - 132


def test_a_report_takes_over_what_it_can_include_and_only_that() -> None:
    fleet = fleet_of("p", "d")
    send(fleet, "early", 1.0)
    send(fleet, "late", 1.2)
    fleet.report(worker("d", Role.DECODE, num_running=1, num_context_tokens=2000, reported_at_s=1.21))
    assert known(fleet, "d").num_running == 2
    fleet.report(worker("d", Role.DECODE, num_running=2, num_context_tokens=4000, reported_at_s=1.3))
    assert known(fleet, "d").num_running == 2


def test_a_report_that_arrives_late_but_whose_figures_are_older_does_not_take_over() -> None:
    """A worker in a long step tells what it was told before."""
    fleet = fleet_of("p", "d")
    send(fleet, "a", 1.0)
    for reported_at_s in (1.25, 1.5, 3.0):
        fleet.report(worker("d", Role.DECODE, reported_at_s=reported_at_s, figures_age_s=reported_at_s - 0.9))
        assert (known(fleet, "d").num_running, known(fleet, "d").reported_at_s) == (1, reported_at_s)
    fleet.report(worker("d", Role.DECODE, num_running=1, reported_at_s=3.25, figures_age_s=0.1))
    assert known(fleet, "d").num_running == 1


def test_a_queue_that_is_told_again_while_it_is_worked_on_grows_no_longer() -> None:
    fleet = fleet_of("p", "d")
    waits_ms = []
    for age_s in (0.0, 0.05, 0.1):
        state = worker("p", queued=queue_of(2000), reported_at_s=1.0 + age_s, taken_age_s=age_s)
        fleet.report(state)
        waits_ms.append(known(fleet, "p").wait_ms(1.0 + age_s))
    assert waits_ms == pytest.approx([waits_ms[0] - late_ms for late_ms in (0, 50, 100)])


def test_a_request_that_ends_before_any_report_is_no_longer_counted() -> None:
    fleet = fleet_of("p", "d")
    before = known(fleet, "p").queued, known(fleet, "d").num_running
    send(fleet, "a", 1.0)
    fleet.ended("a", ["p", "d"])
    fleet.ended("a", ["p", "d", "nobody"])
    assert (known(fleet, "p").queued, known(fleet, "d").num_running) == before


def test_more_sent_than_there_is_room_for_leaves_none_and_not_less() -> None:
    fleet = fleet_of("p", "d")
    for i in range(200):
        send(fleet, str(i), 1.0)
    assert known(fleet, "d").num_free_blocks == 0


def test_a_prefix_that_is_there_takes_no_room_twice() -> None:
    fleet = fleet_of("p", "d")
    shared = request(2000, {"d": 120})
    fleet.sent(shared, Placement(known(fleet, "p"), known(fleet, "d")), 1.0)
    assert known(fleet, "d").num_free_blocks == 10_000 - 12


def test_older_news_is_ignored() -> None:
    fleet = fleet_of()
    fleet.report(worker("p", num_running=3, reported_at_s=2.0))
    fleet.report(worker("p", num_running=7, reported_at_s=1.0))
    assert known(fleet, "p").num_running == 3


def test_a_worker_that_returns_with_another_model_moves_to_its_pool() -> None:
    fleet = fleet_of("d")
    fleet.report(worker("d", Role.DECODE, fingerprint="other", reported_at_s=1.0))
    assert list(fleet.pools(request())) == []
    assert [list(pool.everyone) for pool in fleet.pools(request(fingerprints=frozenset({"other"})))] == [["d"]]
    assert fleet.num_workers() == 1


def test_whoever_is_silent_for_long_is_forgotten() -> None:
    fleet = fleet_of("p", "d", limits=AdmissionLimits(forget_s=10.0))
    fleet.report(worker("d2", Role.DECODE, reported_at_s=11.0))
    (pool,) = fleet.pools(request())
    fleet.candidates(request(), pool, 11.0)
    assert fleet.num_workers() == 1
    assert fleet.snapshot("p") is None


def test_a_draining_worker_gets_nothing_but_may_still_give() -> None:
    fleet = fleet_of("p", "d")
    fleet.report(worker("p", draining=True, reported_at_s=0.1))
    (pool,) = fleet.pools(request())
    candidates = fleet.candidates(request(), pool, 0.2)
    assert list(candidates.prefill) == []
    assert "p" in candidates.holders


def test_first_turns_differ_between_replicas() -> None:
    first = set()
    for seed in range(16):
        fleet = Fleet(AdmissionLimits(), Links(LINK), SPEEDS.__getitem__, seed)
        ids = [f"p{i}" for i in range(8)]
        for worker_id in ids:
            fleet.report(worker(worker_id))
        first.add(min(ids, key=lambda worker_id: known(fleet, worker_id).turn))
    assert len(first) > 3


def test_several_pools_may_serve_a_request_and_no_other() -> None:
    fleet = Fleet(AdmissionLimits(), Links(LINK), SPEEDS.__getitem__)
    for name in ("a", "b", "c"):
        fleet.report(worker(name, fingerprint=f"pool {name}"))
    pools = fleet.pools(request(fingerprints=frozenset({"pool a", "pool c", "gone"})))
    assert [list(pool.everyone) for pool in pools] == [["a"], ["c"]]
    assert list(fleet.pools(request(fingerprints=frozenset()))) == []


def test_spares_wait_least_first_and_could_serve_it_too() -> None:
    fleet = fleet_of("p", "d")
    fleet.report(worker("long", queued=queue_of(9000)))
    fleet.report(worker("short", queued=queue_of(1000)))
    fleet.report(worker("middle", queued=queue_of(4000)))
    fleet.report(worker("small", num_total_blocks=9))
    fleet.report(worker("draining", draining=True))
    fleet.report(worker("failed"))
    fleet.report(worker("elsewhere", fingerprint="other"))
    shape = request(2000, excluded=frozenset({"failed"}))
    assert fleet.spares(shape, "p", "d", 0.0, 2) == ["short", "middle"]
    assert fleet.spares(shape, "p", "d", 0.0, 9) == ["short", "middle", "long"]
    assert fleet.spares(shape, "p", "d", 2.5, 9) == []
    fleet.links.cut(["middle"], "d")
    assert fleet.spares(shape, "p", "d", 0.0, 9) == ["short", "long"]


def test_the_decode_worker_is_no_spare_of_its_own_request() -> None:
    """It would ask itself, and hold the prompt's KV twice."""
    fleet = fleet_of("p")
    for worker_id in ("both", "other"):
        fleet.report(worker(worker_id, Role.BOTH))
    assert fleet.spares(request(), "p", "both", 0.0, 2) == ["other"]


def test_a_request_that_decode_must_prefill_has_no_prefill_candidates() -> None:
    fleet = fleet_of("p", "d")
    (pool,) = fleet.pools(request())
    assert list(fleet.candidates(request(local_prefill=True), pool, 0.0).prefill) == []
    assert len(fleet.candidates(request(local_prefill=True), pool, 0.0).decode) == 1


def test_a_worker_set_aside_gets_nothing_then_one_request_at_a_time() -> None:
    fleet = fleet_of("p", "d", "d2")
    fleet.report(worker("d", Role.DECODE, reported_at_s=1.0), 6.0)
    fleet.report(worker("d2", Role.DECODE, reported_at_s=1.0))
    assert decodes(fleet, 2.0) == {"d2"}
    for now_s in (5.9, 6.0):
        fleet.report(worker("d", Role.DECODE, reported_at_s=now_s), 6.0)
        fleet.report(worker("d2", Role.DECODE, reported_at_s=now_s))
        assert decodes(fleet, now_s) == ({"d2"} if now_s < 6.0 else {"d", "d2"})
    send(fleet, "probe", 6.0)
    assert decodes(fleet, 6.0) == {"d2"}, "it has its one request"
    fleet.ended("probe", ["p", "d"])
    assert decodes(fleet, 6.0) == {"d", "d2"}
    fleet.report(worker("d", Role.DECODE, reported_at_s=6.1, num_running=1), 6.0)
    assert decodes(fleet, 6.1) == {"d2"}, "another router sent it one"


def test_a_worker_set_aside_serves_where_no_other_can() -> None:
    fleet = fleet_of("p", "d")
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        fleet.report(worker(worker_id, role, reported_at_s=1.0, num_running=3), 60.0)
    candidates = fleet.candidates(request(), next(iter(fleet.pools(request()))), 1.0)
    assert [snapshot.worker_id for snapshot in candidates.prefill] == ["p"]
    assert decodes(fleet, 1.0) == {"d"}
    fleet.report(worker("d2", Role.DECODE, reported_at_s=1.0))
    assert decodes(fleet, 1.0) == {"d2"}
    assert decodes(fleet, 1.0, excluded=frozenset({"d2"})) == {"d"}
    assert decodes(fleet, 3.1) == set(), "dead is dead"


def test_a_worker_set_aside_is_no_spare() -> None:
    fleet = fleet_of("p", "p2", "p3", "d")
    fleet.report(worker("p2", Role.PREFILL, reported_at_s=0.0), 60.0)
    assert fleet.spares(request(), "p", "d", 0.0, 2) == ["p3"]


def decodes(fleet: Fleet, now_s: float, **changes: Any) -> set[str]:
    asked = request(**changes)
    pool = next(iter(fleet.pools(asked)))
    return {snapshot.worker_id for snapshot in fleet.candidates(asked, pool, now_s).decode}
