from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigurationError
from tandem.routing.admission import AdmissionLimits, Refusal, RefusalReason
from tandem.routing.pairing import Pairer, Pairing
from tandem.routing.policies import LeastLoaded, PredictedCost, RoundRobin, RoutingPolicy
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Links, LinkState, Role, WorkerState
from tandem.routing.speed import PrefillWork
from tests.unit.routing.builders import pairer_of, queue_of, request, worker

P, D = Role.PREFILL, Role.DECODE


def paired(pairer: Pairer, now_s: float = 0.0, **changes: object) -> Pairing:
    answer = pairer.pair(request(**changes), now_s)  # type: ignore[arg-type]
    assert isinstance(answer, Pairing), answer
    return answer


def refused(pairer: Pairer, now_s: float = 0.0, **changes: object) -> Refusal:
    answer = pairer.pair(request(**changes), now_s)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal), answer
    return answer


def test_identical_requests_spread_over_identical_workers() -> None:
    """Also without any report between them, and although every request shares a prefix that nobody holds yet."""
    pairer = pairer_of(*(worker(f"p{i}") for i in range(5)), *(worker(f"d{i}", D) for i in range(3)))
    answers = [paired(pairer, i * 1e-4, request_id=str(i)) for i in range(60)]
    assert set(Counter(answer.prefill_id for answer in answers).values()) == {12}
    assert set(Counter(answer.decode_id for answer in answers).values()) == {20}


def test_nobody_is_preferred_for_ever_on_an_idle_system() -> None:
    """Each request ends before the next comes, so no load tells the workers apart."""
    pairer = pairer_of(*(worker(f"p{i}") for i in range(4)), *(worker(f"d{i}", D) for i in range(4)))
    chosen: Counter[str | None] = Counter()
    for i in range(40):
        now_s = 0.1 * i
        for state in [worker(f"p{j}", reported_at_s=now_s) for j in range(4)]:
            pairer.fleet.report(state)
        for state in [worker(f"d{j}", D, reported_at_s=now_s) for j in range(4)]:
            pairer.fleet.report(state)
        answer = paired(pairer, now_s, request_id=str(i))
        chosen.update([answer.prefill_id, answer.decode_id])
        pairer.settle(Settlement(request_id=str(i)))
    assert set(chosen.values()) == {10}


def test_fingerprints_are_never_mixed() -> None:
    pairer = pairer_of(
        worker("p-old", fingerprint="old"), worker("d-new", D, fingerprint="new"), worker("d-old", D, fingerprint="old")
    )
    assert paired(pairer, fingerprints=frozenset({"old"})).decode_id == "d-old"
    assert paired(pairer, fingerprints=frozenset({"new"})) == pairer.records()[-1].answer
    assert paired(pairer, fingerprints=frozenset({"new"})).prefill_id is None
    answer = paired(pairer, fingerprints=None)
    assert (answer.prefill_id is None) == (answer.decode_id == "d-new")


def test_the_dead_are_out_within_two_seconds() -> None:
    pairer = pairer_of(worker("p0"), worker("p1", reported_at_s=5.0), worker("d", D, reported_at_s=5.0))
    assert {paired(pairer, 5.0, request_id=str(i)).prefill_id for i in range(5)} == {"p1"}
    no = refused(pairer, 7.1)
    assert no.reason is RefusalReason.NO_WORKER
    assert no.retry_after_s == 2.0


def test_a_retry_avoids_who_failed_and_keeps_its_decode_worker() -> None:
    pairer = pairer_of(worker("p0"), worker("p1"), worker("d0", D), worker("d1", D))
    first = paired(pairer)
    again = paired(pairer, decode_id=first.decode_id, excluded=frozenset({first.prefill_id or ""}))
    assert again.decode_id == first.decode_id
    assert again.prefill_id not in (None, first.prefill_id)
    last = paired(pairer, decode_id=first.decode_id, excluded=frozenset({"p0", "p1"}))
    assert (last.prefill_id, last.decode_id) == (None, first.decode_id)


def test_a_second_pairing_replaces_the_first_in_the_count() -> None:
    pairer = pairer_of(worker("p0"), worker("p1"), worker("d0", D))
    first = paired(pairer)
    paired(pairer, excluded=frozenset({first.prefill_id or ""}))
    left = pairer.fleet.snapshot(first.prefill_id or "")
    assert left is not None
    assert left.queued == PrefillWork()


def test_a_prompt_that_fits_nobody_is_refused_for_good() -> None:
    no = refused(pairer_of(worker("p"), worker("d", D)), num_tokens=200_000)
    assert no.reason is RefusalReason.TOO_LONG
    assert no.retry_after_s is None


def test_full_memory_is_refused_until_enough_is_expected_to_end() -> None:
    def retry_after_s(num_context_tokens: int) -> float:
        full = worker("d", D, num_free_blocks=3, num_running=20, num_context_tokens=num_context_tokens)
        no = refused(pairer_of(worker("p"), full), num_tokens=50_000, num_expected_output=1000)
        assert no.reason is RefusalReason.NO_BLOCKS
        assert no.retry_after_s is not None
        return no.retry_after_s

    assert 0.1 < retry_after_s(100_000) < retry_after_s(1_000_000) < 60


def test_long_queues_are_refused_until_they_have_drained() -> None:
    pairer = pairer_of(
        worker("p", queued=queue_of(100_000)),
        worker("d", D, queued=queue_of(100_000)),
        limits=AdmissionLimits(max_ttft_ms=2000.0, dead_s=60.0),
    )
    no = refused(pairer)
    assert no.reason is RefusalReason.QUEUE
    assert no.retry_after_s is not None
    assert paired(pairer, no.retry_after_s + 1e-3).predicted.ttft_ms <= 2000.0
    assert isinstance(pairer.pair(request(), no.retry_after_s - 0.1), Refusal)


def test_a_requests_own_limit_comes_first() -> None:
    pairer = pairer_of(worker("p", queued=queue_of(10_000)), worker("d", D, queued=queue_of(10_000)))
    assert refused(pairer, max_ttft_ms=100.0).reason is RefusalReason.QUEUE
    assert paired(pairer, max_ttft_ms=5000.0)


@pytest.mark.parametrize("policy", [PredictedCost, RoundRobin, LeastLoaded])
@settings(max_examples=40)
@given(data=st.data())
def test_no_refusal_while_somebody_is_able(policy: Callable[[], RoutingPolicy], data: st.DataObject) -> None:
    """One pair has room and time; the others are random."""
    role = st.sampled_from([P, D])
    others = data.draw(st.lists(st.tuples(role, st.integers(0, 10_000), st.integers(0, 100_000)), max_size=6))
    states: list[WorkerState] = [
        worker(f"w{i}", role, num_free_blocks=num_free, queued=queue_of(num_queued))
        for i, (role, num_free, num_queued) in enumerate(others)
    ]
    pairer = pairer_of(*states, worker("p-able"), worker("d-able", D), policy=policy())
    answer = paired(pairer, max_ttft_ms=200.0)
    assert answer.predicted.ttft_ms <= 200.0
    decode = pairer.fleet.snapshot(answer.decode_id)
    assert decode is not None
    assert decode.worker.num_free_blocks >= 132


def test_a_decision_is_kept_with_its_outcome() -> None:
    pairer = pairer_of(worker("p"), worker("d", D))
    answer = paired(pairer, 0.5)
    record = pairer.settle(Settlement(request_id="r", ttft_ms=answer.predicted.ttft_ms + 7.0))
    assert record is not None
    assert (record.decided_at_s, record.policy, record.answer) == (0.5, "predicted cost", answer)
    assert record.ttft_error_ms == pytest.approx(7.0)
    assert pairer.records() == (record,)
    assert pairer.settle(Settlement(request_id="unknown")) is None


def test_records_are_bounded() -> None:
    pairer = Pairer(pairer_of(worker("p"), worker("d", D)).fleet, PredictedCost(), max_records=10)
    for i in range(50):
        pairer.pair(request(100, request_id=str(i)), 0.0)
    assert [record.request_id for record in pairer.records()] == [str(i) for i in range(40, 50)]
    with pytest.raises(ConfigurationError, match="max_records=0"):
        Pairer(pairer.fleet, PredictedCost(), max_records=0)


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dead_s=0\.5"):
        AdmissionLimits(fresh_s=1.0, dead_s=0.5)
    with pytest.raises(ConfigurationError, match="max_ttft_ms"):
        AdmissionLimits(max_ttft_ms=0.0)


def test_a_prompt_that_takes_longer_than_is_tolerated_is_taken_by_a_worker_without_a_queue() -> None:
    """It was refused for ever on an idle system, with a time to try again that could not help."""
    limits = AdmissionLimits(max_ttft_ms=100.0, dead_s=60.0)
    assert paired(pairer_of(worker("p"), worker("d", D), limits=limits), num_tokens=50_000).prefill_id == "p"
    busy = pairer_of(worker("p", queued=queue_of(10_000)), worker("d", D, queued=queue_of(10_000)), limits=limits)
    no = refused(busy, num_tokens=50_000)
    assert no.reason is RefusalReason.QUEUE
    assert no.retry_after_s is not None
    assert paired(busy, no.retry_after_s + 1e-3, num_tokens=50_000)


def test_a_link_measured_between_two_reports_counts_at_once() -> None:
    """Bounds made of the links known when the workers reported would pass it over."""
    links = Links(LinkState(1e9, 5.0))
    pairer = pairer_of(worker("p"), *(worker(f"d{i}", D) for i in range(6)), links=links)
    paired(pairer)
    links.update("p", "d3", LinkState(10e9, 0.5))
    assert paired(pairer, request_id="next").decode_id == "d3"


def test_decode_workers_reserved_for_others_are_passed_over() -> None:
    pairer = pairer_of(worker("p0"), worker("d0", Role.DECODE), worker("d1", Role.DECODE))
    answer = pairer.pair(request(reserved=frozenset({"d0"})), 0.0)
    assert isinstance(answer, Pairing)
    assert (answer.prefill_id, answer.decode_id) == ("p0", "d1")
    refusal = pairer.pair(request(reserved=frozenset({"d0", "d1"})), 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.NO_BLOCKS, 0.1)
