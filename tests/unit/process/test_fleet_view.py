import logging
import math
from dataclasses import replace

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.process.fleet_view import FleetView
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.outliers import Outliers
from tandem.routing.snapshot import Links, LinkState, Role
from tandem.routing.speed import PrefillWork
from tandem.rpc.messages import LinkReport, PrefillSample, StepSample
from tests.unit.process.stub_workers import model, status
from tests.unit.routing.builders import FAST, LINK, request

P, D = Role.PREFILL, Role.DECODE


class Seen:
    """A view with everything it feeds."""

    def __init__(self, max_workers: int = 100) -> None:
        self.clock = ManualClock(100.0)
        self.calibration = Calibration(FAST)
        self.fleet = Fleet(AdmissionLimits(), Links(LINK), self.calibration.speed)
        self.outliers = Outliers(self.calibration.speed)
        self.view = FleetView(
            self.fleet,
            self.calibration,
            self.clock,
            outliers=self.outliers,
            forget_s=60.0,
            max_workers=max_workers,
        )

    def chosen_from(self) -> set[str]:
        """Workers that the fleet has as candidates for requests."""
        found = set()
        for pool in self.fleet.pools(request(fingerprints=None)):
            candidates = self.fleet.candidates(request(10), pool, self.clock.now_s())
            found |= {snapshot.worker_id for snapshot in (*candidates.prefill, *candidates.decode)}
        return found

    def alive(self) -> dict[str, bool]:
        return {listing.status.worker.worker_id: listing.is_alive for listing in self.view.listings()}


def test_updates_are_dated_by_the_routers_own_clock() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p", reported_at_s=-5e9))
    snapshot = seen.fleet.snapshot("p")
    assert snapshot is not None
    assert snapshot.reported_at_s == 100.0


def test_whose_watch_is_lost_gets_nothing_and_stays_listed() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p"))
    seen.view.update("h:2", status("d", D))
    assert seen.chosen_from() == {"p", "d"}
    seen.view.mark_lost("h:1")
    seen.view.mark_lost("h:9")
    assert seen.chosen_from() == {"d"}
    assert seen.alive() == {"p": False, "d": True}
    seen.view.update("h:1", status("p"))
    assert seen.chosen_from() == {"p", "d"}


@pytest.mark.parametrize(
    ("lifecycle", "is_chosen", "is_known"),
    [("starting", False, False), ("ready", True, True), ("draining", False, True), ("stopped", False, False)],
)
def test_only_the_ready_get_requests_and_the_draining_still_give_blocks(
    lifecycle: str, is_chosen: bool, is_known: bool
) -> None:
    seen = Seen()
    for before in ("ready", "starting"):
        seen.view.update("h:1", status("d", D, lifecycle=before))
        seen.view.update("h:1", status("d", D, lifecycle=lifecycle))
        assert (seen.chosen_from() == {"d"}) == is_chosen
        assert (seen.fleet.snapshot("d") is not None) == is_known
        assert seen.alive() == {"d": is_chosen}
        assert [info.name for info in seen.view.models()] == ["m"] * is_chosen


def test_a_new_incarnation_starts_cold_and_without_the_olds_links() -> None:
    seen = Seen()
    link = LinkReport(source_id="q", transport="tcp", path="", bytes_per_s=5e9, latency_s=0.001, is_slow=False)
    samples = tuple(PrefillSample(work=PrefillWork.of(100, 0), duration_s=0.5) for _ in range(3))
    seen.view.update("h:2", status("q"))
    seen.view.update("h:1", status("d", D, fields={"links": (link,), "prefill_samples": samples}))
    assert seen.fleet.links.between("q", "d") == LinkState(5e9, 1.0)
    seen.view.update("h:1", status("d", D, incarnation="2", epoch=2, fields={"prefill_samples": samples}))
    assert seen.fleet.links.between("q", "d") == LINK
    assert seen.calibration.speed("fast") == FAST
    seen.view.update("h:1", status("d", D, incarnation="2", epoch=2, fields={"prefill_samples": samples[:1]}))
    assert seen.calibration.speed("fast") != FAST


def test_links_are_taken_once_their_source_is_there() -> None:
    seen = Seen()
    link = LinkReport(source_id="p", transport="tcp", path="", bytes_per_s=5e9, latency_s=0.001, is_slow=False)
    told = status("d", D, fields={"links": (link,)})
    seen.view.update("h:1", told)
    assert seen.fleet.links.between("p", "d") == LINK
    seen.view.update("h:2", status("p"))
    seen.view.update("h:1", told)
    assert seen.fleet.links.between("p", "d") == LinkState(5e9, 1.0)
    seen.view.mark_lost("h:2")
    seen.view.update("h:1", told)
    seen.view.update("h:2", status("p", incarnation="2"))
    seen.view.update("h:1", told)
    assert seen.fleet.links.between("p", "d") == LinkState(5e9, 1.0)


def test_peers_that_a_worker_cannot_reach_are_cut_from_it_until_it_says_otherwise() -> None:
    seen = Seen()
    link = LinkReport(source_id="p", transport="tcp", path="", bytes_per_s=5e9, latency_s=0.001, is_slow=False)
    well = status("d", D, fields={"links": (link,)})
    cut = status("d", D, fields={"links": (link,), "unreachable": ("p", "gone")})
    seen.view.update("h:2", status("p"))
    seen.view.update("h:1", cut)
    assert seen.fleet.links.cut_into("d") == {"p"}
    assert seen.fleet.links.between("p", "d").latency_ms == math.inf
    seen.view.mark_lost("h:2")
    seen.view.update("h:2", status("p"))
    seen.view.update("h:1", cut)
    assert seen.fleet.links.between("p", "d").latency_ms == math.inf
    seen.view.update("h:1", well)
    assert seen.fleet.links.cut_into("d") == frozenset()
    assert seen.fleet.links.between("p", "d") == LinkState(5e9, 1.0)


def test_a_measurement_that_is_none_hurts_nobody() -> None:
    seen = Seen()
    link = LinkReport(source_id="d", transport="tcp", path="", bytes_per_s=0.0, latency_s=0.0, is_slow=True)
    wrong = StepSample(num_running=1, num_context_tokens=1, duration_s=0.0)
    for _ in range(5):
        seen.view.update("h:1", status("d", D, fields={"step_samples": (wrong,), "links": (link,)}))
    assert seen.chosen_from() == {"d"}
    assert seen.calibration.speed("fast") == FAST


def test_somebody_else_at_the_same_address_replaces_who_was_there() -> None:
    seen = Seen()
    seen.view.update("h:1", status("old"))
    seen.view.update("h:1", status("new"))
    assert seen.chosen_from() == {"new"}
    assert seen.alive() == {"old": False, "new": True}
    assert seen.view.forgettable() == [("old", "")]
    seen.view.forget("old")
    assert seen.alive() == {"new": True}


def test_somebody_else_after_a_gap_replaces_too() -> None:
    seen = Seen()
    seen.view.update("h:1", status("old"))
    seen.view.mark_lost("h:1")
    assert list(seen.view.forgettable()) == []
    seen.view.update("h:1", status("new"))
    assert seen.view.forgettable() == [("old", "")]


def test_a_worker_that_moves_is_called_at_its_new_address() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p", epoch=1))
    seen.view.update("h:2", status("p", incarnation="2", epoch=2))
    assert seen.view.address_of("p").address == "h:2"
    seen.view.update("h:1", status("p", epoch=1))
    assert seen.view.address_of("p").address == "h:2"
    assert seen.view.address_of("p").incarnation == "2"
    seen.view.mark_lost("h:1")
    assert seen.chosen_from() == {"p"}
    seen.view.mark_lost("h:2")
    assert seen.chosen_from() == set()


def test_the_same_worker_behind_two_addresses_is_one() -> None:
    seen = Seen()
    for address in ("h:1", "h:2", "h:1", "h:2"):
        seen.view.update(address, status("p"))
    assert seen.view.address_of("p").address == "h:1"
    seen.view.mark_lost("h:2")
    assert seen.chosen_from() == {"p"}
    seen.view.mark_lost("h:1")
    assert seen.chosen_from() == set()
    seen.view.update("h:2", status("p"))
    assert seen.view.address_of("p").address == "h:2"


def test_the_dead_are_forgotten_after_a_while_the_living_never() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p"))
    seen.view.update("h:2", status("d", D))
    seen.view.mark_lost("h:1")
    seen.clock.advance(60.5)
    seen.view.update("h:2", status("d", D))
    assert seen.view.forgettable() == [("p", "h:1")]
    seen.view.forget("p")
    seen.view.forget("d")
    assert seen.alive() == {"d": True}


def test_who_stops_talking_is_not_alive_even_before_its_watch_notices() -> None:
    seen = Seen()
    seen.view.update("h:1", status("d", D))
    seen.clock.advance(2.1)
    assert seen.alive() == {"d": False}
    assert seen.chosen_from() == set()
    assert list(seen.view.models()) == []


def test_nonsense_and_a_crowd_are_refused() -> None:
    seen = Seen(max_workers=1)
    with pytest.raises(InvalidRequestError):
        seen.view.update("h:1", status(""))
    seen.view.update("h:1", status("p"))
    with pytest.raises(CapacityError):
        seen.view.update("h:2", status("q"))
    assert seen.alive() == {"p": True}


def test_versions_of_a_model_have_a_chain_each() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p", served=model(fingerprint="one"), fingerprint="pool-1"))
    seen.view.update("h:2", status("q", served=model(fingerprint="one"), fingerprint="pool-2"))
    seen.view.update("h:3", status("r", served=model(fingerprint="two"), fingerprint="pool-3", block_size=32))
    seen.view.update("h:4", status("s", served=model("other"), fingerprint="pool-4"))
    first, second = seen.view.chains("m")
    assert (first.model_fingerprint, first.block_size, first.pools) == ("one", 16, frozenset({"pool-1", "pool-2"}))
    assert (second.model_fingerprint, second.block_size, second.pools) == ("two", 32, frozenset({"pool-3"}))
    assert [seen.view.is_of(name, second) for name in ("p", "r", "nobody")] == [False, True, False]
    seen.view.mark_lost("h:3")
    assert list(seen.view.chains("m")) == [first]
    seen.view.update("h:1", status("p", served=model(fingerprint="two"), fingerprint="pool-3", block_size=32))
    assert {chain.pools for chain in seen.view.chains("m")} == {frozenset({"pool-2"}), frozenset({"pool-3"})}
    assert list(seen.view.chains("nothing")) == []


def test_models_are_as_narrow_as_their_narrowest_worker_and_need_somebody_who_decodes() -> None:
    seen = Seen()
    seen.view.update("h:1", status("p", served=model(max_model_len=100)))
    assert list(seen.view.models()) == []
    seen.view.update("h:2", status("d", D, served=model(max_model_len=200)))
    seen.view.update("h:3", status("b", Role.BOTH))
    (info,) = seen.view.models()
    assert (info.name, info.max_model_len, info.num_prefill, info.num_decode) == ("m", 100, 2, 2)


STEP = StepSample(num_running=4, num_context_tokens=2000, duration_s=FAST.decode.step_ms(4, 2000) / 1000)


def run(seen: Seen, duration_s: float, slowness: dict[str, float], incarnation: str = "1") -> None:
    """Updates of three decode workers for a while, each with some steps."""
    for _ in range(round(duration_s / 0.25)):
        seen.clock.advance(0.25)
        for worker_id in ("d0", "d1", "d2"):
            step = replace(STEP, duration_s=STEP.duration_s * slowness.get(worker_id, 1.0))
            fields = {"step_samples": (step,) * 10}
            seen.view.update(f"h:{worker_id}", status(worker_id, D, incarnation=incarnation, fields=fields))


def slowness_of(seen: Seen) -> dict[str, float | None]:
    return {listing.status.worker.worker_id: listing.slowness for listing in seen.view.listings()}


def test_a_slow_worker_is_set_aside_said_so_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    """It was given as many requests as its peers for as long as it lived."""
    seen = Seen()
    with caplog.at_level(logging.INFO):
        run(seen, 5.0, {"d1": 16.0})
        assert seen.chosen_from() == {"d0", "d2"}
        found = slowness_of(seen)
        assert (found["d0"], found["d2"]) == (None, None)
        assert found["d1"] is not None
        assert found["d1"] > 10
        assert seen.alive()["d1"]
        run(seen, 12.0, {})
    assert seen.chosen_from() == {"d0", "d1", "d2"}
    assert slowness_of(seen) == {"d0": None, "d1": None, "d2": None}
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "worker d1 is set aside for 5 s" in messages[0]
    assert "worker d1 serves again" in messages[1]


def test_what_a_worker_measures_while_it_is_set_aside_does_not_calibrate_its_kind() -> None:
    seen = Seen()
    run(seen, 10.0, {})
    seen_ms = seen.calibration.speed("fast").decode.step_ms(4, 2000)
    run(seen, 60.0, {"d1": 16.0})
    assert seen.calibration.speed("fast").decode.step_ms(4, 2000) == pytest.approx(seen_ms, rel=0.05)


def test_a_verdict_outlives_a_broken_watch_and_ends_with_the_process() -> None:
    seen = Seen()
    run(seen, 5.0, {"d1": 16.0})
    seen.view.mark_lost("h:d1")
    seen.view.update("h:d1", status("d1", D))
    assert seen.chosen_from() == {"d0", "d2"}
    seen.view.update("h:d1", status("d1", D, incarnation="2", epoch=2))
    assert seen.chosen_from() == {"d0", "d1", "d2"}


@pytest.mark.parametrize(
    ("duration_s", "num_tokens"), [(0.0, 10), (-1.0, 10), (math.nan, 10), (1e-322, 2**63), (1e300, 10)]
)
def test_a_measurement_that_is_none_sets_nobody_aside(duration_s: float, num_tokens: int) -> None:
    """Rounds of zeros were the median once, and whoever reported next was divided by it."""
    seen = Seen()
    wrong = StepSample(num_running=1, num_context_tokens=num_tokens, duration_s=duration_s)
    for _ in range(40):
        seen.clock.advance(0.25)
        for worker_id in ("d0", "d1"):
            samples = (wrong,) * 10 if worker_id == "d1" else (STEP,) * 10
            seen.view.update(f"h:{worker_id}", status(worker_id, D, fields={"step_samples": samples}))
    assert seen.chosen_from() == {"d0", "d1"}
