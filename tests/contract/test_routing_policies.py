"""Contract of every routing policy, whatever its formula."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.router_peers import CacheAware, DynamoLinear, DynamoProduct, WeightedScores
from tandem.core.errors import ConfigurationError
from tandem.routing.pairing import Pairing
from tandem.routing.policies import POLICIES, PredictedCost, RoutingPolicy, SessionSticky, policy_named
from tandem.routing.snapshot import Links, Role
from tests.unit.routing.builders import LINK, candidates_of, pairer_of, queue_of, request, requests, worker, workers

MAKERS: list[Callable[[], RoutingPolicy]] = [
    *POLICIES.values(),
    lambda: PredictedCost(num_fetch_sources=0),
    DynamoLinear,
    DynamoProduct,
    WeightedScores,
    CacheAware,
]
every_policy = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make().name.replace(" ", "-"))
P, D = Role.PREFILL, Role.DECODE


@every_policy
@settings(max_examples=20)
@given(data=st.data())
def test_chooses_only_among_candidates_and_within_the_limit(
    make: Callable[[], RoutingPolicy], data: st.DataObject
) -> None:
    states = data.draw(workers())
    shape = data.draw(requests(states))
    candidates = candidates_of(*states, max_ttft_ms=data.draw(st.sampled_from([50.0, 1000.0, float("inf")])))
    choice = make().choose(shape, candidates)
    if choice is not None:
        assert choice.decode in candidates.decode
        assert choice.prefill is None or choice.prefill in candidates.prefill
        assert choice.prefill is not choice.decode
        assert choice.holder is None or choice.holder in candidates.holders.values()


@every_policy
def test_serves_whenever_there_is_a_pair(make: Callable[[], RoutingPolicy]) -> None:
    choice = make().choose(request(), candidates_of(worker("p"), worker("d", D)))
    assert choice is not None
    assert choice.decode.worker_id == "d"
    assert choice.prefill is not None


@every_policy
def test_no_pair_is_made_whose_link_is_cut(make: Callable[[], RoutingPolicy]) -> None:
    links = Links(LINK)
    pairer = pairer_of(
        *(worker(name) for name in ("p0", "p1")), worker("d0", D), worker("d1", D), policy=make(), links=links
    )
    links.cut(["p0"], "d0")
    links.cut(["p0", "p1"], "d1")
    made = set()
    for number in range(40):
        answer = pairer.pair(request(request_id=str(number), session_id="s"), 0.0)
        assert isinstance(answer, Pairing)
        made.add((answer.prefill_id, answer.decode_id))
    assert made <= {("p1", "d0"), (None, "d0"), (None, "d1")}
    links.cut([], "d1")
    links.cut([], "d0")
    again = [pairer.pair(request(request_id=f"again {number}"), 0.0) for number in range(40)]
    assert any(isinstance(answer, Pairing) and answer.prefill_id is not None for answer in again)


@every_policy
def test_decode_workers_alone_serve_and_so_does_one_that_does_both(make: Callable[[], RoutingPolicy]) -> None:
    for state in (worker("d", D), worker("d", Role.BOTH)):
        answer = pairer_of(state, policy=make()).pair(request(), 0.0)
        assert isinstance(answer, Pairing)
        assert (answer.prefill_id, answer.decode_id) == (None, "d")


@every_policy
def test_decode_workers_alone_are_chosen_by_the_policy_within_the_limit(make: Callable[[], RoutingPolicy]) -> None:
    states = [worker("d0", D), worker("d1", D, queued=queue_of(50_000))]
    for max_ttft_ms, allowed in ((float("inf"), {"d0", "d1"}), (1000.0, {"d0"})):
        choice = make().choose(request(), candidates_of(*states, max_ttft_ms=max_ttft_ms))
        assert choice is not None
        assert choice.prefill is None
        assert choice.decode.worker_id in allowed
    assert make().choose(request(), candidates_of(*states, max_ttft_ms=1.0)) is None


@every_policy
def test_nobody_to_choose_from_is_no_choice(make: Callable[[], RoutingPolicy]) -> None:
    assert make().choose(request(), candidates_of()) is None


@every_policy
def test_never_the_dead_the_draining_the_excluded_or_another_model(make: Callable[[], RoutingPolicy]) -> None:
    """The forbidden ones look best: idle, and with the whole prefix cached."""
    forbidden = [
        *(worker(f"dead-{role}", role, reported_at_s=1.0) for role in Role),
        *(worker(f"draining-{role}", role, reported_at_s=9.9, draining=True) for role in Role),
        *(worker(f"excluded-{role}", role, reported_at_s=9.9) for role in Role),
        *(worker(f"other-{role}", role, reported_at_s=9.9, fingerprint="other") for role in Role),
        *(worker(f"small-{role}", role, reported_at_s=9.9, num_total_blocks=9) for role in Role),
    ]
    allowed = [
        worker("p", queued=queue_of(3000), reported_at_s=9.9),
        worker("d", D, num_running=30, num_context_tokens=50_000, reported_at_s=9.9),
    ]
    pairer = pairer_of(*forbidden, *allowed, policy=make())
    leading = {state.worker_id: 125 for state in forbidden}
    excluded = frozenset(f"excluded-{role}" for role in Role)
    for i in range(20):
        answer = pairer.pair(request(2000, leading, request_id=str(i), excluded=excluded), 10.0)
        assert isinstance(answer, Pairing)
        assert answer.decode_id == "d"
        assert answer.prefill_id in ("p", None)
        source = answer.fetch_from_id or ""
        assert not source.startswith(("dead", "other"))


@every_policy
def test_no_worker_is_left_out_or_preferred_for_ever(make: Callable[[], RoutingPolicy]) -> None:
    pairer = pairer_of(*(worker(f"p{i}") for i in range(4)), *(worker(f"d{i}", D) for i in range(4)), policy=make())
    answers = [pairer.pair(request(request_id=str(i)), 0.0) for i in range(200)]
    for ids in (
        Counter(answer.prefill_id for answer in answers if isinstance(answer, Pairing)),
        Counter(answer.decode_id for answer in answers if isinstance(answer, Pairing)),
    ):
        assert len(ids) == 4
        assert max(ids.values()) < 90


@every_policy
def test_the_same_history_gives_the_same_choices(make: Callable[[], RoutingPolicy]) -> None:
    def run() -> list[object]:
        pairer = pairer_of(*(worker(f"p{i}") for i in range(3)), worker("d", D), policy=make(), seed=7)
        return [pairer.pair(request(100 * (i + 1), {"p1": i}, request_id=str(i)), 0.01 * i) for i in range(20)]

    assert run() == run()


def test_every_setting_names_a_policy_and_others_are_refused() -> None:
    assert {policy_named(name).name.replace(" ", "-") for name in POLICIES} == set(POLICIES)
    with pytest.raises(ConfigurationError, match=r"'fastest' is unknown; use one of predicted-cost"):
        policy_named("fastest")


def test_a_session_stays_while_its_workers_are_there() -> None:
    policy = SessionSticky()
    states = [worker("p0"), worker("p1"), worker("d0", D), worker("d1", D)]
    first = policy.choose(request(session_id="s"), candidates_of(*states))
    assert first is not None
    assert first.prefill is not None
    busy = [
        worker(s.worker_id, s.role, queued=queue_of(5000), num_running=9)
        if s.worker_id in (first.prefill.worker_id, first.decode.worker_id)
        else s
        for s in states
    ]
    again = policy.choose(request(session_id="s"), candidates_of(*busy))
    assert again is not None
    assert again.prefill is not None
    assert (again.prefill.worker_id, again.decode.worker_id) == (first.prefill.worker_id, first.decode.worker_id)
    gone = [state for state in states if state.worker_id != first.prefill.worker_id]
    moved = policy.choose(request(session_id="s"), candidates_of(*gone))
    assert moved is not None
    assert moved.prefill is not None


def test_a_session_stays_on_its_decode_worker_where_there_is_no_prefill_worker() -> None:
    policy = SessionSticky()
    pairer = pairer_of(*(worker(f"d{i}", D) for i in range(3)), policy=policy)
    answers = [pairer.pair(request(request_id=str(i), session_id="s"), 0.0) for i in range(6)]
    assert len({answer.decode_id for answer in answers if isinstance(answer, Pairing)}) == 1
    assert len(policy) == 1


def test_a_prompt_that_decode_computes_leaves_a_session_its_prefill_worker() -> None:
    pairer = pairer_of(*(worker(f"p{i}") for i in range(3)), worker("d", D), policy=SessionSticky())
    answers = [pairer.pair(request(request_id=str(i), session_id="s", local_prefill=i == 1), 0.0) for i in range(3)]
    first, local, again = [answer.prefill_id for answer in answers if isinstance(answer, Pairing)]
    assert (first, local) == (again, None)


def test_remembered_sessions_are_bounded() -> None:
    policy = SessionSticky(max_sessions=2)
    candidates = candidates_of(worker("p0"), worker("p1"), worker("d", D))
    for session in "abc":
        assert policy.choose(request(session_id=session), candidates) is not None
    assert len(policy) == 2
