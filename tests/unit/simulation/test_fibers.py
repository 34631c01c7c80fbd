"""Fibers wait in virtual time: events of a node resume them, and none of its own runs beside them."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from tandem.simulation.fibers import Fiber, Signal, current_fiber, in_fiber
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.node import Node, current_node


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop("a seed")
    yield made
    made.tear_down()


@pytest.fixture
def node(loop: VirtualLoop) -> Node:
    made = Node("a node", loop.time, random.Random("a node"))
    loop.add(made)
    return made


def test_an_hour_of_sleep_takes_no_time_and_belongs_to_the_node(loop: VirtualLoop, node: Node) -> None:
    def work() -> tuple[float, Node | None]:
        current_fiber().sleep(3600)
        return loop.time(), current_node.get()

    assert loop.run_until_complete(in_fiber(loop, node, work)) == (3600.0, node)


def test_what_it_raises_is_raised_where_it_is_waited_for(loop: VirtualLoop, node: Node) -> None:
    def work() -> None:
        raise ValueError("a word")

    with pytest.raises(ValueError, match="a word"):
        loop.run_until_complete(in_fiber(loop, node, work))


def test_it_goes_on_when_what_it_waits_for_is_so_or_in_vain(loop: VirtualLoop, node: Node) -> None:
    changed, values = Signal(), list[int]()

    def work() -> tuple[bool, bool, float]:
        fiber = current_fiber()
        first = fiber.wait_for(lambda: len(values) == 2, changed, 10.0)
        return first, fiber.wait_for(lambda: len(values) == 3, changed, 10.0), loop.time()

    async def main() -> object:
        waiting = asyncio.ensure_future(in_fiber(loop, node, work))
        for number in range(2):
            await asyncio.sleep(1.0)
            values.append(number)
            changed.notify()
        return await waiting

    assert loop.run_until_complete(main()) == (True, False, 12.0)


def test_one_of_a_paused_node_goes_on_later_and_one_of_a_dead_node_never(loop: VirtualLoop, node: Node) -> None:
    seen: list[float] = []

    def work() -> None:
        while True:
            current_fiber().sleep(1.0)
            seen.append(loop.time())

    async def main() -> None:
        Fiber(loop, node, work)
        await asyncio.sleep(1.5)
        node.is_paused = True
        await asyncio.sleep(3.0)
        node.is_paused = False
        await asyncio.sleep(1.2)
        loop.kill(node)
        await asyncio.sleep(5.0)

    loop.run_until_complete(main())
    assert seen == [1.0, 4.5, 5.5]


def test_the_end_of_a_run_ends_those_that_wait_whatever_they_clean_up(node: Node, loop: VirtualLoop) -> None:
    seen: list[str] = []

    def work() -> None:
        try:
            current_fiber().sleep(10.0)
        finally:
            try:
                current_fiber().sleep(10.0)
            finally:
                seen.append("over")

    async def main() -> None:
        Fiber(loop, node, work)
        await asyncio.sleep(1.0)

    loop.run_until_complete(main())
    loop.tear_down()
    assert seen == ["over"]
