"""The virtual clock: time moves by timers alone, each node keeps its order, and nothing is lost but what dies."""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest

from tandem.core.machine import monotonic_s, random_id, wall_s
from tandem.simulation.loop import DeadlockError, EndlessError, VirtualLoop
from tandem.simulation.node import EPOCH_S, Node


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop("a seed")
    yield made
    made.tear_down()


def node_of(loop: VirtualLoop, name: str) -> Node:
    node = Node(name, loop.time, random.Random(name))
    loop.add(node)
    return node


def run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(work)


def test_an_hour_of_sleep_takes_no_time(loop: VirtualLoop) -> None:
    async def work() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(loop, work()) == 3600.0


def test_timers_of_one_moment_run_in_the_order_they_were_set(loop: VirtualLoop) -> None:
    seen: list[int] = []

    async def work() -> None:
        for number in range(50):
            loop.call_at(1.0, seen.append, number)
        await asyncio.sleep(2.0)

    run(loop, work())
    assert seen == list(range(50))


def test_a_node_keeps_its_order_and_nodes_are_mixed(loop: VirtualLoop) -> None:
    seen: list[tuple[str, int]] = []

    async def say(name: str) -> None:
        for number in range(30):
            loop.call_soon(seen.append, (name, number))
        await asyncio.sleep(1)

    async def work() -> None:
        await asyncio.gather(*(node_of(loop, name).spawn(loop, say(name), name) for name in "ab"))

    run(loop, work())
    assert [number for name, number in seen if name == "a"] == list(range(30))
    names = [name for name, _ in seen]
    assert names not in (sorted(names), sorted(names, reverse=True))


def test_waiting_for_what_nobody_does_is_a_deadlock(loop: VirtualLoop) -> None:
    with pytest.raises(DeadlockError, match="no timer is set"):
        run(loop, asyncio.Event().wait())


def test_a_paused_node_does_late_what_it_was_to_do(loop: VirtualLoop) -> None:
    at_s: list[float] = []

    async def tick() -> None:
        await asyncio.sleep(1.0)
        at_s.append(loop.time())

    async def work() -> None:
        node = node_of(loop, "paused")
        node.spawn(loop, tick(), "tick")
        await asyncio.sleep(0.5)
        node.is_paused = True
        await asyncio.sleep(5.0)
        node.is_paused = False
        await asyncio.sleep(0.1)

    run(loop, work())
    assert at_s == [5.5]


def test_a_killed_node_runs_nothing_not_even_what_cleans_up(loop: VirtualLoop) -> None:
    seen: list[str] = []

    async def hold() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            if not loop.is_closed():
                seen.append("cleaned up")

    async def work() -> None:
        node = node_of(loop, "killed")
        node.spawn(loop, hold(), "hold")
        await asyncio.sleep(1)
        loop.kill(node)
        await asyncio.sleep(20)
        assert not seen

    run(loop, work())


def test_work_for_a_thread_takes_what_it_spends(loop: VirtualLoop) -> None:
    told: list[float] = []

    def job() -> str:
        loop.spend(2.0)
        loop.call_soon_threadsafe(lambda: told.append(loop.time()))
        loop.spend(1.0)
        return "done"

    async def work() -> float:
        assert await asyncio.to_thread(job) == "done"
        return loop.time()

    ended_s = run(loop, work())
    assert len(told) == 1
    assert 2.0 < told[0] < 2.2
    assert 3.0 < ended_s < 3.2


def test_a_node_has_clocks_and_random_bytes_of_its_own(loop: VirtualLoop) -> None:
    async def look() -> tuple[float, float, str]:
        await asyncio.sleep(1.0)
        return monotonic_s(), wall_s(), random_id()

    async def work() -> Sequence[tuple[float, float, str]]:
        one, other = node_of(loop, "one"), node_of(loop, "other")
        other.wall_offset_s = -50.0
        return await asyncio.gather(one.spawn(loop, look(), "one"), other.spawn(loop, look(), "other"))

    (first_s, first_wall_s, first_id), (second_s, second_wall_s, second_id) = run(loop, work())
    assert first_s == second_s == 1.0
    assert (first_wall_s, second_wall_s) == (EPOCH_S + 1.0, EPOCH_S - 49.0)
    assert first_id != second_id
    assert first_id == random.Random("one").randbytes(16).hex()


def test_what_no_task_catches_is_kept_as_a_bug(loop: VirtualLoop) -> None:
    async def work() -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    run(loop, work())
    assert len(loop.bugs) == 1
    assert "ZeroDivisionError" in loop.bugs[0]


def test_what_goes_round_for_ever_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.simulation.loop._MAX_EVENTS", 100)
    loop = VirtualLoop("0")

    async def ask_again() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(EndlessError, match=r"100 callbacks ran until 0\.000 s, the next is of world"):
        loop.run_until_complete(ask_again())
    loop.tear_down()
