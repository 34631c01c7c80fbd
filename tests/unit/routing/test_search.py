import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.routing.candidates import Candidates, Placement, num_cached_tokens
from tandem.routing.cost import predict
from tandem.routing.search import SHORT_TOKENS, cheapest
from tandem.routing.snapshot import Links, LinkState, RequestShape, Role
from tests.unit.routing.builders import (
    LINK,
    candidates_of,
    links_between,
    queue_of,
    request,
    requests,
    worker,
    workers,
)

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def every_choice(shape: RequestShape, candidates: Candidates) -> Iterator[Placement]:
    """Brute force: each pair, with each source that holds more; and each decode worker alone."""
    yield from pairs(shape, candidates)
    yield from locals_of(shape, candidates)


def pairs(shape: RequestShape, candidates: Candidates) -> Iterator[Placement]:
    for prefill, decode in itertools.product(candidates.prefill, candidates.decode):
        if prefill.worker_id == decode.worker_id:
            continue
        yield Placement(prefill, decode)
        num_held = num_cached_tokens(shape, prefill.worker)
        for holder in candidates.holders.values():
            if num_cached_tokens(shape, holder.worker) > num_held:
                yield Placement(prefill, decode, holder)


def locals_of(shape: RequestShape, candidates: Candidates) -> Iterator[Placement]:
    for decode in candidates.decode:
        num_lacking = shape.num_tokens - num_cached_tokens(shape, decode.worker)
        if decode.worker.role is BOTH or num_lacking <= candidates.max_local_tokens:
            yield Placement(None, decode)


def admissible(shape: RequestShape, candidates: Candidates) -> list[tuple[float, Placement]]:
    """Placements that may be chosen, with their costs; pairs for short prompts only if nothing else may be."""

    def priced(choices: Iterator[Placement]) -> list[tuple[float, Placement]]:
        found = [(predict(shape, choice, candidates.links, candidates.now_s), choice) for choice in choices]
        return [
            (cost.total_ms, choice)
            for cost, choice in found
            if cost.ttft_ms <= candidates.max_ttft_ms and cost.total_ms < math.inf
        ]

    local = priced(locals_of(shape, candidates))
    return local if local and shape.num_tokens <= SHORT_TOKENS else local + priced(pairs(shape, candidates))


@given(data=st.data())
def test_the_choice_is_the_cheapest_of_all(data: st.DataObject) -> None:
    states = data.draw(workers())
    shape = data.draw(requests(states))
    candidates = candidates_of(
        *states,
        links=data.draw(links_between(states)),
        now_s=data.draw(st.sampled_from([0.0, 0.2])),
        max_ttft_ms=data.draw(st.sampled_from([20.0, 200.0, 2000.0, float("inf")])),
    )
    found = cheapest(shape, candidates, num_fetch_sources=len(states))
    expected = admissible(shape, candidates)
    if expected:
        assert found is not None
        predicted = predict(shape, found, candidates.links, candidates.now_s)
        assert predicted.ttft_ms <= candidates.max_ttft_ms * (1 + 1e-9)
        assert predicted.total_ms == pytest.approx(min(cost for cost, _ in expected), rel=1e-9)
    elif found is not None:
        assert found.prefill is None, "only a long local prefill is left when nothing else is admissible"


@pytest.mark.parametrize("seed", range(60))
def test_close_calls_are_decided_exactly(seed: int) -> None:
    """Loads and links differ by a few milliseconds, so a bound that is off by one shows."""
    source = random.Random(seed)
    slowest = source.choice([2.5e8, 5e9])
    prefills = [worker(f"p{i}", queued=queue_of(source.randrange(200))) for i in range(5)]
    decodes = [worker(f"d{i}", D, num_context_tokens=source.randrange(100_000)) for i in range(5)]
    pairs = itertools.product(prefills + decodes, prefills + decodes)
    links = {
        (a.worker_id, b.worker_id): LinkState(source.uniform(slowest, slowest * 8), source.uniform(0, 3))
        for a, b in pairs
    }
    leading = {state.worker_id: source.randrange(40, 60) for state in prefills + decodes}
    shape = request(1000, leading, num_expected_output=2)
    candidates = candidates_of(*prefills, *decodes, links=Links(LinkState(slowest, 3.0), links), max_local_tokens=100)
    found = cheapest(shape, candidates, num_fetch_sources=10)
    assert found is not None
    cost_ms = predict(shape, found, candidates.links, 0.0).total_ms
    assert cost_ms == pytest.approx(min(cost for cost, _ in admissible(shape, candidates)), rel=1e-9)


@settings(max_examples=40)
@given(data=st.data())
def test_more_cached_never_costs_more(data: st.DataObject) -> None:
    states = data.draw(workers())
    shape = data.draw(requests(states))
    more = {state.worker_id: data.draw(st.integers(0, 100)) for state in states}
    warmer = replace(
        shape,
        leading_blocks={key: shape.leading_blocks.get(key, 0) + more[key] for key in more},
    )
    candidates = candidates_of(*states, links=data.draw(links_between(states)))
    for choice in every_choice(shape, candidates):
        if choice.holder is None:
            before = predict(shape, choice, candidates.links, 0.0).total_ms
            assert predict(warmer, choice, candidates.links, 0.0).total_ms <= before + 1e-6


@settings(max_examples=40)
@given(data=st.data(), factor=st.floats(1.0, 1000.0), extra_ms=st.floats(0.0, 100.0))
def test_a_slower_link_never_costs_less(data: st.DataObject, factor: float, extra_ms: float) -> None:
    states = data.draw(workers())
    shape = data.draw(requests(states))
    fast = data.draw(st.builds(LinkState, st.floats(1e7, 1e12), st.floats(0.0, 10.0)))
    slow = LinkState(fast.bytes_per_s / factor, fast.latency_ms + extra_ms)
    for choice in every_choice(shape, candidates_of(*states)):
        before = predict(shape, choice, Links(fast), 0.0).total_ms
        assert predict(shape, choice, Links(slow), 0.0).total_ms >= before - 1e-6


def test_short_tails_stay_on_decode_and_long_ones_do_not() -> None:
    candidates = candidates_of(worker("p"), worker("d", D))
    short = cheapest(request(2000, {"d": 124}), candidates)
    long = cheapest(request(2000), candidates)
    assert short is not None
    assert short.prefill is None
    assert long is not None
    assert long.prefill is not None


def test_the_shortest_prompts_are_not_handed_over_however_fast_prefill_is() -> None:
    """A worker's learnt speed moves; whoever dies unnoticed then takes no request that needs nobody else."""
    states = worker("p"), worker("d", D, kind="slow")
    short, longer = (cheapest(request(num), candidates_of(*states)) for num in (SHORT_TOKENS, SHORT_TOKENS + 1))
    assert short is not None
    assert short.prefill is None
    assert longer is not None
    assert longer.prefill is not None
    forbidden = cheapest(request(SHORT_TOKENS), candidates_of(*states, max_local_tokens=0))
    assert forbidden is not None
    assert forbidden.prefill is not None


def test_decode_prefills_long_prompts_only_when_nobody_else_can() -> None:
    alone = cheapest(request(2000), candidates_of(worker("d", D)))
    assert alone is not None
    assert alone.prefill is None
    late = candidates_of(worker("p", queued=queue_of(50_000)), worker("d", D), max_ttft_ms=500.0)
    found = cheapest(request(2000), late)
    assert found is not None
    assert found.prefill is None


def test_a_prefix_is_fetched_when_that_is_quicker_than_computing_it() -> None:
    shape = request(8000, {"d": 480, "p": 10})
    states = (worker("p"), worker("d", D), worker("e", D))
    fetched = cheapest(shape, candidates_of(*states, links=Links(LinkState(50e9, 0.1)), max_local_tokens=0))
    computed = cheapest(shape, candidates_of(*states, links=Links(LinkState(1e8, 0.1)), max_local_tokens=0))
    assert fetched is not None
    assert fetched.holder is not None
    assert fetched.holder.worker_id == "d"
    assert computed is not None
    assert computed.holder is None


def test_a_short_fetch_behind_a_queue_is_found_though_a_long_one_is_not_worth_it() -> None:
    """A bound from the longest prefix alone would pass this worker over for one without any fetch."""
    link = LinkState(1e9 / 3, 0.0)
    links = Links(LinkState(1e6, 0.0), {("short", "p"): link, ("long", "p"): link, ("p", "d"): LINK, ("q", "d"): LINK})
    states = (
        worker("p", queued=queue_of(930)),
        worker("q", queued=queue_of(830)),
        worker("short", draining=True),
        worker("long", draining=True),
        worker("d", D),
    )
    known = candidates_of(*states, links=links, max_local_tokens=0)
    found = cheapest(request(1000, {"short": 16, "long": 60}), replace(known, prefill=known.prefill[:2]))
    assert found is not None
    assert (found.prefill and found.prefill.worker_id, found.holder and found.holder.worker_id) == ("p", "short")


def test_nearer_decode_is_taken_when_all_else_is_equal() -> None:
    links = Links(LinkState(1e9, 5.0), {("p", "d3"): LINK})
    states = [worker("p"), *(worker(f"d{i}", D) for i in range(6))]
    found = cheapest(request(), candidates_of(*states, links=links))
    assert found is not None
    assert found.decode.worker_id == "d3"


def test_busy_decode_is_avoided() -> None:
    states = [worker("p"), worker("d0", D, num_running=30, num_context_tokens=60_000), worker("d1", D, num_running=3)]
    found = cheapest(request(), candidates_of(*states))
    assert found is not None
    assert found.decode.worker_id == "d1"


def test_an_objective_at_risk_outweighs_a_shorter_way() -> None:
    """Without the objective the cached prefix wins; with it, the batch that stays below it."""
    states = [
        worker("p"),
        worker("near", D, num_running=20, num_context_tokens=40_000),
        worker("far", D, num_running=19, num_context_tokens=38_000),
    ]
    links = Links(LinkState(1e8, 0.0), {("p", "near"): LinkState(1e12, 0.0)})
    free = cheapest(request(num_expected_output=1), candidates_of(*states, links=links))
    bound = cheapest(request(num_expected_output=1000, max_tpot_ms=8.07), candidates_of(*states, links=links))
    assert free is not None
    assert free.decode.worker_id == "near"
    assert bound is not None
    assert bound.decode.worker_id == "far"


def test_a_pair_whose_link_is_cut_is_no_choice() -> None:
    """Workers between which nothing got through were paired again and again, two seconds lost each time."""
    links = Links(LINK, {("near", "d"): LinkState(1e12, 0.0)})
    states = [worker("near"), worker("far", queued=queue_of(2000)), worker("d", D)]
    links.cut(["near"], "d")
    found = cheapest(request(), candidates_of(*states, links=links))
    assert found is not None
    assert found.prefill is not None
    assert found.prefill.worker_id == "far"
    links.cut(["near", "far"], "d")
    found = cheapest(request(), candidates_of(*states, links=links))
    assert found is not None
    assert found.prefill is None


def test_a_prefix_is_not_fetched_over_a_link_that_is_cut() -> None:
    states, shape = [worker("p"), worker("holder", D), worker("d", D)], request(leading={"holder": 100})
    links = Links(LinkState(50e9, 0.1))
    assert cheapest(shape, candidates_of(*states, links=links, max_local_tokens=0)).holder is not None  # type: ignore[union-attr]
    links.cut(["holder"], "p")
    found = cheapest(shape, candidates_of(*states, links=links, max_local_tokens=0))
    assert found is not None
    assert (found.prefill is not None, found.holder) == (True, None)


def test_nobody_is_no_choice() -> None:
    assert cheapest(request(), candidates_of()) is None
    assert cheapest(request(), candidates_of(worker("p"))) is None


@pytest.mark.parametrize("seed", range(20))
def test_large_even_fleets_with_uneven_links_are_decided_exactly(seed: int) -> None:
    """Loads hardly differ, so every pair is a close call: the former search gave up after some thousand pairs."""
    source = random.Random(seed)
    prefills = [worker(f"p{i}", queued=queue_of(source.choice([0, 0, 0, 50]))) for i in range(40)]
    decodes = [worker(f"d{i}", D, num_running=20 + source.randrange(3)) for i in range(40)]
    links = Links(LinkState(1e9, 0.2))
    for prefill, decode in itertools.product(prefills, decodes):
        if source.random() < 0.1:
            links.update(prefill.worker_id, decode.worker_id, LinkState(source.uniform(8e9, 12e9), 0.1))
    leading = {state.worker_id: source.choice([50, 375, 750]) for state in source.sample(prefills + decodes, 4)}
    shape = request(12_000, leading, num_expected_output=20)
    candidates = candidates_of(*prefills, *decodes, links=links)
    found = cheapest(shape, candidates)
    assert found is not None
    holders = {key: held for key, held in candidates.holders.items() if key in leading}
    few = replace(candidates, holders=holders)
    least_ms = min(cost for cost, _ in admissible(shape, few))
    assert predict(shape, found, links, 0.0).total_ms == pytest.approx(least_ms, rel=1e-9)
