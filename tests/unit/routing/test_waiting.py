"""Turns of requests of several gateways: whose it is, and for how long it is kept."""

from typing import Any

import pytest

from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.queue_place import QueuePlace
from tandem.routing.snapshot import Links, Role
from tandem.routing.waiting import KEPT_S, TOLERATED_S, WaitingRequests
from tests.unit.routing.builders import FAST, LINK, request, worker

NOW_S = 100.0


class Turns:
    """A fleet with decode workers of two versions of a model, and the questions of gateways."""

    def __init__(self) -> None:
        self.fleet = Fleet(AdmissionLimits(), Links(LINK), Calibration(FAST).speed)
        for name, version in (("d0", "old"), ("d1", "new"), ("d2", "new")):
            state = worker(name, Role.DECODE, fingerprint=version, num_total_blocks=10, reported_at_s=NOW_S)
            self.fleet.report(state)
        self.waiting = WaitingRequests()

    def asks(self, place: QueuePlace, at_s: float = NOW_S, *, lacks_room: bool = True, **needs: Any) -> set[str]:
        """Asks, and returns which workers it must leave to others."""
        shape = request(16, **{"num_expected_output": 16, "fingerprints": frozenset({"old", "new"}), **needs})
        reserved = self.waiting.reserved(place, shape, self.fleet, at_s)
        self.waiting.asked(place, shape, at_s, lacks_room=lacks_room)
        return set(reserved)


def place(queue: str, waited_s: float = 0.0, *, others_wait: bool = False, is_retry: bool = False) -> QueuePlace:
    return QueuePlace(queue=queue, waited_s=waited_s, others_wait=others_wait, is_retry=is_retry)


ALL = {"d0", "d1", "d2"}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (place("a", is_retry=True), place("b", 60.0), ALL),
        (place("a", 60.0), place("b", is_retry=True), set()),
        (place("a", 5.0), place("b", 5.0 - 0.9 * TOLERATED_S), set()),
        (place("a", 5.0), place("b", 5.0 - 1.1 * TOLERATED_S), ALL),
        (place("a", 5.0, is_retry=True), place("b", is_retry=True), ALL),
        (place("a", -3.0), place("b", 0.0), set()),
        (place("a", 0.0), place("b", -3.0), ALL),
        (place("a", is_retry=True), place("a"), set()),
        (place("", is_retry=True), place("b"), set()),
        (place("a", is_retry=True), QueuePlace(), ALL),
    ],
)
def test_retries_go_first_then_who_has_waited_clearly_longer(
    first: QueuePlace, second: QueuePlace, expected: set[str]
) -> None:
    turns = Turns()
    assert turns.asks(first) == set()
    assert turns.asks(second) == expected


def test_only_workers_that_could_serve_it_are_left_to_it() -> None:
    turns = Turns()
    turns.asks(place("a", is_retry=True), fingerprints=frozenset({"new"}), excluded=frozenset({"d2"}))
    assert turns.asks(place("b")) == {"d1"}
    turns.asks(place("a", is_retry=True), num_expected_output=16 * 100)
    assert turns.asks(place("b")) == set(), "it fits none of them"
    turns.asks(place("a", is_retry=True), fingerprints=frozenset({"new"}))
    assert turns.asks(place("b"), fingerprints=frozenset({"old"})) == set(), "what it cannot use is not kept from it"


def test_a_turn_ends_with_room_unless_others_wait_behind() -> None:
    turns = Turns()
    turns.asks(place("a", is_retry=True))
    turns.asks(place("a", is_retry=True, others_wait=True), lacks_room=False)
    assert turns.asks(place("b")) == ALL
    turns.asks(place("a", is_retry=True), lacks_room=False)
    assert turns.asks(place("b")) == set()


def test_a_gateway_that_asks_no_more_keeps_room_for_a_moment_only() -> None:
    turns = Turns()
    turns.asks(place("a", is_retry=True))
    assert turns.asks(place("b"), NOW_S + 0.9 * KEPT_S) == ALL
    assert turns.asks(place("b"), NOW_S + 1.1 * KEPT_S) == set()
    assert len(turns.waiting) == 1, "of the dead gateway nothing is kept"


def test_however_many_leave_a_queue_it_keeps_one_turn() -> None:
    """Otherwise requests that give up in turn would keep out everybody for ever."""
    turns = Turns()
    for number in range(50):
        turns.asks(place("a", 10.0), NOW_S + number / 100)
    assert len(turns.waiting) == 1
    assert turns.asks(place("a", 0.0), NOW_S + 0.5) == set()
    assert turns.asks(place("b", 0.0), NOW_S + 0.5) == set()
