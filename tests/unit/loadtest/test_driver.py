"""An open loop waits for nobody, a closed one for its own answer only; both end as they should."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import SystemClock
from tandem.loadtest.driver import PAUSE_AFTER_FAILURE_S, Driver
from tandem.loadtest.endpoint import GatewayEndpoint
from tandem.loadtest.failure import CLIENT_LIMIT
from tandem.loadtest.load_test import make_driver
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.plan import Arrivals
from tandem.workload.lengths import Fixed
from tests.unit.loadtest.scripted_server import (
    Script,
    ScriptedServer,
    Speaker,
    error_answer,
    load_plan,
    right_answer,
    scripted_server,
)

Drive = tuple[Driver, ScriptedServer]


async def drive(server: ScriptedServer, stop: asyncio.Event, lead_s: float = 0.0, **options: Any) -> Driver:
    clock = SystemClock()
    plan = load_plan(server.url, **options)
    endpoint = GatewayEndpoint(plan, clock)
    try:
        facts = await endpoint.open()
        driver = make_driver(plan, endpoint, facts)
        endpoint.begin(clock.now_s() + plan.warm_up_s + lead_s)
        await driver.run(stop)
    finally:
        await endpoint.http.close()
    return driver


def driven(script: Script = right_answer, **options: Any) -> Drive:
    async def run() -> Drive:
        async with scripted_server(script) as server:
            return await drive(server, asyncio.Event(), **options), server

    return asyncio.run(run())


def counted(driver: Driver) -> Sequence[RequestOutcome]:
    return [outcome for outcome in driver.outcomes if not outcome.is_warm_up]


def test_an_open_loop_is_not_delayed_by_a_server_that_does_not_answer() -> None:
    async def silent(body: dict[str, Any], speaker: Speaker) -> None:
        await asyncio.Event().wait()

    arrivals = Arrivals(rate_per_s=100, process="evenly")
    driver, server = driven(silent, arrivals=arrivals, num_requests=30, request_timeout_s=2.0)
    assert [outcome.due_s for outcome in driver.outcomes] == pytest.approx([n / 100 for n in range(30)])
    assert server.most_open == 30
    assert max(outcome.sent_s for outcome in driver.outcomes) < 2.0 <= min(each.ended_s for each in driver.outcomes)
    assert all(outcome.lateness_s >= 0 for outcome in driver.outcomes)


def test_a_client_that_falls_behind_sends_all_the_same_and_says_how_late() -> None:
    driver, server = driven(arrivals=Arrivals(rate_per_s=100, process="evenly"), num_requests=10, lead_s=-5.0)
    assert len(server.asked) == 10
    assert all(outcome.lateness_s > 4.8 for outcome in driver.outcomes)
    for outcome in driver.outcomes:
        ttft_s = outcome.served().ttft_s
        assert ttft_s is not None
        assert ttft_s > 4.8, "waiting for the client is waiting, too"


@pytest.mark.parametrize("process", ["poisson", "bursty", "evenly"])
def test_the_same_seed_asks_the_same_at_the_same_times(process: Any) -> None:
    arrivals = Arrivals(rate_per_s=200, process=process)
    runs = [driven(arrivals=arrivals, num_requests=12, seed=seed) for seed in (1, 1, 2)]
    one, two, other = [
        ([sorted(outcome.due_s for outcome in driver.outcomes)], sorted(str(asked["prompt"]) for asked in server.asked))
        for driver, server in runs
    ]
    assert one == two
    assert one[1] != other[1]


def test_too_many_open_requests_are_failures_of_the_client_and_no_delay() -> None:
    async def silent(body: dict[str, Any], speaker: Speaker) -> None:
        await asyncio.Event().wait()

    arrivals = Arrivals(rate_per_s=100, process="evenly")
    driver, server = driven(silent, arrivals=arrivals, num_requests=10, max_open=4, request_timeout_s=2.0)
    kinds = [outcome.failure.kind for outcome in driver.outcomes if outcome.failure is not None]
    assert kinds.count(CLIENT_LIMIT) == 6
    assert len(server.asked) == 4
    assert driver.num_failed == len(driver.outcomes) == 10


def test_a_closed_loop_has_all_its_clients_open_and_never_more() -> None:
    async def run() -> Drive:
        three = asyncio.Barrier(3)

        async def together(body: dict[str, Any], speaker: Speaker) -> None:
            await three.wait()
            await right_answer(body, speaker)

        async with scripted_server(together) as server:
            return await drive(server, asyncio.Event(), arrivals=Arrivals(concurrency=3), num_requests=21), server

    driver, server = asyncio.run(run())
    assert len(driver.outcomes) == len(server.asked) == 21
    assert server.most_open == 3
    assert not driver.has_lasted
    assert driver.num_failed == 0
    assert all(outcome.failure is None for outcome in driver.outcomes)
    assert len({str(asked["prompt"]) for asked in server.asked}) == 21


def test_clients_think() -> None:
    driver, _ = driven(arrivals=Arrivals(concurrency=1, think_time_s=0.02), num_requests=10)
    outcomes = driver.outcomes
    pauses = [after.sent_s - before.ended_s for before, after in itertools.pairwise(outcomes)]
    assert sum(pauses) > 0.05
    assert all(outcome.due_s > 0 for outcome in outcomes)


def test_turns_follow_each_other_and_begin_with_what_was_said() -> None:
    for arrivals in (Arrivals(concurrency=1), Arrivals(rate_per_s=50, process="evenly")):
        driver, server = driven(arrivals=arrivals, num_requests=9, turns=Fixed(3))
        by_start: dict[str, list[list[int]]] = {}
        for asked in server.asked:
            by_start.setdefault(str(asked["prompt"][:8]), []).append(asked["prompt"])
        assert sorted(map(len, by_start.values()), reverse=True)[0] == 3
        for prompts in by_start.values():
            for before, after in itertools.pairwise(prompts):
                assert after[: len(before) + 4] == [*before, 0, 1, 2, 3]
        assert {outcome.turn for outcome in driver.outcomes} <= {0, 1, 2}


def test_warm_up_is_sent_and_not_counted() -> None:
    for arrivals in (Arrivals(concurrency=2, think_time_s=0.01), Arrivals(rate_per_s=60, process="evenly")):
        driver, server = driven(arrivals=arrivals, num_requests=8, warm_up_s=0.2)
        assert len(counted(driver)) == 8
        assert len(server.asked) == len(driver.outcomes) > 8


def test_the_time_ends_it_and_open_requests_are_waited_for() -> None:
    async def run() -> None:
        go = asyncio.Event()

        async def held(body: dict[str, Any], speaker: Speaker) -> None:
            await go.wait()
            await right_answer(body, speaker)

        async with scripted_server(held) as server:
            arrivals = Arrivals(rate_per_s=50, process="evenly")
            driving = asyncio.create_task(
                drive(server, asyncio.Event(), arrivals=arrivals, num_requests=None, duration_s=0.2)
            )
            await server.until_asked(10)
            go.set()
            driver = await driving
        assert len(driver.outcomes) == 10
        assert driver.has_lasted
        assert all(outcome.failure is None for outcome in driver.outcomes)

    asyncio.run(run())


def test_quiet_seconds_at_the_end_are_waited_for() -> None:
    async def run() -> None:
        async with scripted_server() as server:
            arrivals = Arrivals(rate_per_s=2, process="evenly")
            began_s = time.monotonic()
            driver = await drive(server, asyncio.Event(), arrivals=arrivals, num_requests=None, duration_s=0.4)
        assert time.monotonic() - began_s >= 0.4
        assert driver.has_lasted
        assert len(driver.outcomes) == 1

    asyncio.run(run())


def test_stopping_ends_everything_at_once() -> None:
    async def run() -> None:
        async def second_is_silent(body: dict[str, Any], speaker: Speaker) -> None:
            if len(server.asked) > 1:
                await asyncio.Event().wait()
            await right_answer(body, speaker)

        for arrivals in (Arrivals(concurrency=1), Arrivals(rate_per_s=1, process="evenly")):
            stop = asyncio.Event()
            async with scripted_server(second_is_silent) as server, asyncio.timeout(5):
                driving = asyncio.create_task(drive(server, stop, arrivals=arrivals, num_requests=None))
                await server.until_asked(2)
                stop.set()
                driver = await driving
            assert [outcome.is_unfinished for outcome in driver.outcomes] == [False, True]
            assert driver.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_test_that_is_cut_short_has_not_lasted(is_stopped: bool) -> None:
    """Though a client was to think until its end: rates were divided by the planned duration."""

    async def run() -> None:
        stop, duration_s = asyncio.Event(), 60.0 if is_stopped else 0.4
        arrivals = Arrivals(concurrency=50, think_time_s=duration_s / 4)
        number = None if is_stopped else 1
        async with scripted_server() as server, asyncio.timeout(20):
            driving = asyncio.create_task(
                drive(server, stop, arrivals=arrivals, num_requests=number, duration_s=duration_s)
            )
            await server.until_asked(1)
            if is_stopped:
                stop.set()
            driver = await driving
        assert len(driver.outcomes) == 1
        assert not driver.has_lasted

    asyncio.run(run())


def test_a_refused_client_asks_again_soon_or_when_it_was_told() -> None:
    async def refuses_once(body: dict[str, Any], speaker: Speaker) -> None:
        if not is_refused.is_set():
            is_refused.set()
            await speaker.raw(error_answer(429, "capacity_exceeded", retry_after="3"))
            return
        await right_answer(body, speaker)

    for honours, least_s, most_s in ((False, PAUSE_AFTER_FAILURE_S, 2.5), (True, 3.0, 20.0)):
        is_refused = asyncio.Event()
        arrivals = Arrivals(concurrency=1, honour_retry_after=honours)
        driver, _ = driven(refuses_once, arrivals=arrivals, num_requests=2)
        refused, answered = driver.outcomes
        assert refused.failure is not None
        assert refused.failure.is_refusal
        assert answered.failure is None
        assert least_s <= answered.sent_s - refused.ended_s < most_s


def test_a_server_that_is_away_does_not_make_a_closed_loop_spin() -> None:
    async def run() -> Driver:
        clock = SystemClock()
        async with scripted_server() as server:
            plan = load_plan(server.url, arrivals=Arrivals(concurrency=1), num_requests=None, duration_s=2.0)
            endpoint = GatewayEndpoint(plan, clock)
            driver = make_driver(plan, endpoint, await endpoint.open())
        endpoint.begin(clock.now_s())
        await driver.run(asyncio.Event())
        await endpoint.http.close()
        return driver

    driver = asyncio.run(run())
    assert 3 <= len(driver.outcomes) <= 21
    assert all(outcome.failure is not None for outcome in driver.outcomes)


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:4{second}.0,{second + 1},{second + 2}" for second in range(5)]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arrivals = Arrivals(trace=tmp_path / "t.csv", time_scale=0.05)
    driver, server = driven(arrivals=arrivals, num_requests=None)
    assert [outcome.due_s for outcome in driver.outcomes] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert [len(asked["prompt"]) for asked in server.asked] == [1, 2, 3, 4, 5]
    assert [asked["max_tokens"] for asked in server.asked] == [2, 3, 4, 5, 6]
    assert driver.trace_problem is None


def test_a_trace_ends_before_a_line_that_cannot_be_read_and_what_was_sent_is_waited_for(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:4{second}.0,5,{tokens}" for second, tokens in enumerate((3, 4, 0, 6))]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arrivals = Arrivals(trace=tmp_path / "t.csv", time_scale=0.05)
    driver, server = driven(arrivals=arrivals, num_requests=None)
    assert [asked["max_tokens"] for asked in server.asked] == [3, 4]
    assert [outcome.due_s for outcome in driver.outcomes] == pytest.approx([0.0, 0.05])
    assert all(outcome.failure is None for outcome in driver.outcomes)
    assert driver.trace_problem is not None
    assert "t.csv:4: GeneratedTokens=0; a whole number above zero" in driver.trace_problem
    ended, _ = driven(arrivals=arrivals, num_requests=2)
    assert len(ended.outcomes) == 2
    assert ended.trace_problem is None
