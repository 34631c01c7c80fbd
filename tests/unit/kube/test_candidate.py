"""Two may never lead at one time: the rules, and then any order of events two candidates can meet."""

import dataclasses
import random

import pytest

from tandem.core.errors import ConfigurationError
from tandem.kube.candidate import Candidate, LeaseTerms
from tandem.kube.lease import Lease

TERMS = LeaseTerms(lease_s=15, renew_deadline_s=10, retry_s=2)
FREE = Lease(name="l", holder="", duration_s=1, resource_version="1")
THEIRS = Lease(name="l", holder="b", duration_s=15, renewed_s=5.0, num_transitions=4, resource_version="2")


@pytest.mark.parametrize(
    ("lease_s", "deadline_s", "retry_s"), [(15, 15, 2), (10, 15, 2), (15, 10, 10), (15, 10, 0), (15, 2, 3)]
)
def test_terms_that_allow_two_holders_are_refused(lease_s: float, deadline_s: float, retry_s: float) -> None:
    with pytest.raises(ConfigurationError, match="two holders"):
        LeaseTerms(lease_s=lease_s, renew_deadline_s=deadline_s, retry_s=retry_s)


def test_a_free_lease_is_taken_at_once() -> None:
    candidate = Candidate("a", TERMS)
    candidate.saw(FREE, 100.0)
    bid = candidate.bid(100.0, wall_s=7.0)
    assert bid == Lease(
        name="l", holder="a", duration_s=15, acquired_s=7.0, renewed_s=7.0, num_transitions=1, resource_version="1"
    )
    assert candidate.remaining_s(100.0) == 0, "a bid is no victory"
    candidate.won(bid, 100.0, 103.0)
    assert candidate.remaining_s(103.0) == 7.0, "counted from asking, not from the answer"
    assert candidate.remaining_s(110.0) == 0


def test_anothers_lease_is_taken_when_it_was_seen_unchanged_for_all_its_time() -> None:
    """The holder's clock does not matter, only ours."""
    candidate = Candidate("a", TERMS)
    candidate.saw(THEIRS, 100.0)
    assert candidate.bid(114.9, 0.0) is None
    candidate.saw(dataclasses.replace(THEIRS, resource_version="3"), 114.0)
    assert candidate.bid(128.9, 0.0) is None
    bid = candidate.bid(129.0, 0.0)
    assert bid is not None
    assert (bid.holder, bid.num_transitions, bid.resource_version) == ("a", 5, "3")


def test_a_holder_with_longer_terms_is_waited_for() -> None:
    candidate = Candidate("a", TERMS)
    candidate.saw(dataclasses.replace(THEIRS, duration_s=60), 0.0)
    assert candidate.bid(59.0, 0.0) is None
    assert candidate.bid(60.0, 0.0) is not None


def test_renewing_keeps_since_when_it_leads() -> None:
    candidate = Candidate("a", TERMS)
    candidate.saw(FREE, 0.0)
    bid = candidate.bid(0.0, 50.0)
    assert bid is not None
    candidate.won(dataclasses.replace(bid, resource_version="2"), 0.0, 0.0)
    again = candidate.bid(2.0, 52.0)
    assert again is not None
    assert (again.acquired_s, again.renewed_s, again.num_transitions) == (50.0, 52.0, 1)
    assert again.resource_version == "2"


def test_seeing_another_name_ends_it_at_once() -> None:
    candidate = Candidate("a", TERMS)
    candidate.saw(FREE, 0.0)
    bid = candidate.bid(0.0, 0.0)
    assert bid is not None
    candidate.won(bid, 0.0, 0.0)
    candidate.saw(THEIRS, 1.0)
    assert candidate.remaining_s(1.0) == 0
    assert candidate.resignation() is None


def test_who_resigns_leaves_it_free() -> None:
    candidate = Candidate("a", TERMS)
    assert candidate.resignation() is None
    candidate.saw(FREE, 0.0)
    bid = candidate.bid(0.0, 0.0)
    assert bid is not None
    candidate.won(bid, 0.0, 0.0)
    left = candidate.resignation()
    assert left is not None
    assert left.holder == ""
    other = Candidate("b", TERMS)
    other.saw(left, 1.0)
    assert other.bid(1.0, 0.0) is not None


@pytest.mark.parametrize("seed", range(20))
def test_two_never_lead_at_one_time_whatever_is_slow_or_lost(seed: int) -> None:
    """A server that compares versions; writes that take up to 40 s, or whose answers never come."""
    chance = random.Random(seed)
    now_s, stored, version, num_terms = 0.0, FREE, 1, 0
    candidates = [Candidate(name, TERMS) for name in "abc"]
    busy_until = [0.0] * 3
    pending: list[tuple[float, int, Lease, float]] = []
    answers: list[tuple[float, int, Lease, float]] = []
    leader_before = None
    for _ in range(4000):
        now_s += chance.uniform(0.1, 1.0)
        for due in [item for item in pending if item[0] <= now_s]:
            pending.remove(due)
            _, who, bid, asked_s = due
            if bid.resource_version == str(version):
                version += 1
                stored = dataclasses.replace(bid, resource_version=str(version))
                if chance.random() < 0.7:
                    answers.append((busy_until[who], who, stored, asked_s))
        for due in [item for item in answers if item[0] <= now_s]:
            answers.remove(due)
            candidates[due[1]].won(due[2], due[3], now_s)
        for who, candidate in enumerate(candidates):
            if busy_until[who] > now_s or chance.random() < 0.5:
                continue
            candidate.saw(stored, now_s)
            bid_now = candidate.bid(now_s, wall_s=chance.uniform(0, 1e9))
            if bid_now is not None:
                busy_until[who] = now_s + chance.choice([0.1, 0.1, 0.5, 0.5, 12.0, 40.0])
                written_s = now_s + chance.random() * (busy_until[who] - now_s)
                pending.append((written_s, who, bid_now, now_s))
        leading = [candidate.identity for candidate in candidates if candidate.remaining_s(now_s) > 0]
        assert len(leading) <= 1
        num_terms += bool(leading) and leading != leader_before
        leader_before = leading or leader_before
    assert num_terms > 3, "the trial should have seen leaders change"
