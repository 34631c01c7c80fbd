"""The thread that steps an engine: everything that is put is served, cancelled or reported as failed."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from bench.race.peers.scripts.completions import Asked, Delta
from bench.race.peers.scripts.stepping import Stepping

LIMIT_S = 20.0


class Counting:
    """Every step gives each request the next number; a request for 13 tokens breaks it, one for 99 gets nothing."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.cancelled: list[int] = []

    def add(self, request_id: int, prompt: list[int], num_output: int) -> None:
        if num_output == 13:
            raise ValueError("unlucky")
        self.given[request_id], self.wanted[request_id] = 0, num_output

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        del self.wanted[request_id]

    def step(self) -> Sequence[Delta]:
        return [self._next(request_id) for request_id in list(self.wanted) if self.wanted[request_id] != 99]

    def _next(self, request_id: int) -> Delta:
        self.given[request_id] += 1
        is_last = self.given[request_id] == self.wanted[request_id]
        if is_last:
            del self.wanted[request_id]
        return Delta(request_id, [self.given[request_id]], is_last)


def with_stepping(check: Callable[[Stepping, Counting, "asyncio.Future[None]"], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine = Counting()
        stepping, loop = Stepping(engine), asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        stepping.begin(loop, failed.set_exception)
        await asyncio.wait_for(check(stepping, engine, failed), LIMIT_S)
        if not failed.done():
            stepping.put(Asked(0, [], 13))
            with pytest.raises(ValueError, match="unlucky"):
                await asyncio.wait_for(failed, LIMIT_S)

    asyncio.run(run())


async def tokens_of(asked: Asked) -> list[int]:
    found: list[int] = []
    while True:
        delta = await asked.deltas.get()
        found += delta.token_ids
        if delta.is_last:
            return found


def test_each_gets_its_own() -> None:
    async def check(stepping: Stepping, engine: Counting, failed: "asyncio.Future[None]") -> None:
        asked = [Asked(number, [number], 2 + number) for number in range(1, 6)]
        for one in asked:
            stepping.put(one)
        assert await asyncio.gather(*map(tokens_of, asked)) == [list(range(1, 3 + number)) for number in range(1, 6)]
        late = Asked(9, [9], 3)
        stepping.put(late)
        assert await tokens_of(late) == [1, 2, 3]

    with_stepping(check)


def test_a_cancelled_one_is_forgotten_and_the_others_go_on() -> None:
    async def check(stepping: Stepping, engine: Counting, failed: "asyncio.Future[None]") -> None:
        stuck, other = Asked(1, [1], 99), Asked(2, [2], 4)
        stepping.put(stuck)
        stepping.cancel(1)
        stepping.cancel(77)
        stepping.put(other)
        assert await tokens_of(other) == [1, 2, 3, 4]
        assert engine.cancelled == [1]
        assert stuck.deltas.empty()

    with_stepping(check)


def test_a_broken_engine_is_told_of() -> None:
    async def check(stepping: Stepping, engine: Counting, failed: "asyncio.Future[None]") -> None:
        stepping.put(Asked(1, [1], 13))
        with pytest.raises(ValueError, match="unlucky"):
            await failed

    with_stepping(check)
