"""A pool full of leases: requests wait without the engine spinning, and go on when a lease ends."""

import asyncio
from pathlib import Path

import pytest

from tandem.core.errors import EngineStoppedError
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.scheduler.output import KVReserved, SampledToken
from tandem.scheduler.request import Handoff
from tests.helpers.engines import tiny_engine
from tests.helpers.workers import GREEDY, prompt_of, until

PROMPT = prompt_of(60)


class Counted:
    """Counter of the calls of a scheduler."""

    def __init__(self, engine: Engine) -> None:
        self.number = 0
        self._schedule = engine._scheduler.schedule
        engine._scheduler.schedule = self  # type: ignore[method-assign,assignment]

    def __call__(self) -> object:
        self.number += 1
        return self._schedule()


def test_an_engine_that_cannot_go_on_sleeps_until_a_lease_ends(llama: Path) -> None:
    async def main() -> None:
        engine = tiny_engine(llama, block_size=8)
        counted = Counted(engine)
        async with AsyncEngine(engine) as serving:
            await serving.call(lambda e: e.kv.borrow("lease", 10_000))
            streams = [serving.generate(PROMPT, GREEDY, request_id=str(i)) for i in range(3)]
            tasks = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: is_stalled(serving), "a stalled engine")
            before = counted.number
            await asyncio.wait(tasks, timeout=0.3)
            assert counted.number <= before + 1, "it spins"
            await serving.call(lambda e: e.kv.drop("lease"))
            answers = await asyncio.gather(*tasks)
            assert {len(answer) for answer in answers} == {GREEDY.max_tokens}

    asyncio.run(main())


async def tokens_of(stream: object) -> list[int]:
    return [t async for output in stream for t in output.token_ids]  # type: ignore[attr-defined]


async def is_stalled(serving: AsyncEngine) -> bool:
    return await serving.call(lambda e: e.is_stalled and e.num_waiting == 3)


def test_a_request_that_waits_for_kv_does_not_keep_the_engine_busy(llama: Path) -> None:
    async def main() -> None:
        engine = tiny_engine(llama, block_size=8)
        counted = Counted(engine)
        async with AsyncEngine(engine) as serving:
            stream = serving.stream(PROMPT, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=60))
            reserved = await anext(stream)
            assert isinstance(reserved, KVReserved)
            before = counted.number
            _, pending = await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.2)
            for task in pending:
                task.cancel()
            assert counted.number <= before + 1, "it spins"
            serving.note_kv_ended("r", 0)
            assert len(await tokens_of(stream)) == GREEDY.max_tokens
            usage = await serving.call(lambda e: e.kv_usage)
            assert usage.transferring == 8
            serving.post(lambda e: e.kv.drop(reserved.fetch_id))
            usage = await serving.call(lambda e: e.kv_usage)
            assert (usage.transferring, usage.used) == (0, 0)

    asyncio.run(main())


def test_a_reservation_that_nobody_took_is_dropped(llama: Path) -> None:
    """The stream closes while its update waits in its queue, or is still on its way."""

    async def main(patience: int) -> None:
        async with AsyncEngine(tiny_engine(llama, block_size=8)) as serving:
            await serving.call(lambda e: e.kv.borrow("taken", 10_000))
            stream = serving.stream(PROMPT, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=60))
            task = asyncio.ensure_future(anext(stream))
            await until(lambda: knows(serving), "the request")
            serving.post(lambda e: e.kv.drop("taken"))
            await serving.call(lambda e: None)
            for _ in range(patience):
                await asyncio.sleep(0)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            await stream.aclose()
            if isinstance(outcome, KVReserved):
                serving.post(lambda e: e.kv.drop(outcome.fetch_id))
            await until(lambda: is_free(serving), f"no pins after {patience}", 1)

    for patience in range(5):
        asyncio.run(main(patience))


async def knows(serving: AsyncEngine) -> bool:
    return await serving.call(lambda e: e.knows("r"))


async def is_free(serving: AsyncEngine) -> bool:
    usage = await serving.call(lambda e: e.kv_usage)
    return (usage.used, usage.leased, usage.transferring) == (0, 0, 0)


def test_actions_after_the_end_do_nothing(llama: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(tiny_engine(llama)) as serving:
            pass
        done: list[int] = []
        serving.post(lambda e: done.append(1))
        serving.note_kv_ended("r", 0)
        try:
            await serving.call(lambda e: done.append(2))
        except EngineStoppedError:
            done.append(3)
        assert done == [3]

    asyncio.run(main())


@pytest.mark.parametrize("token_id", [-1, 199, 2**31 - 1, 2**63])
def test_a_token_that_the_model_lacks_is_not_taken(llama: Path, token_id: int) -> None:
    """It ended the engine: no embedding, no bytes in a block hash."""

    async def main() -> None:
        async with AsyncEngine(tiny_engine(llama, block_size=8)) as serving:
            stream = serving.stream(PROMPT, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=60))
            reserved = await anext(stream)
            assert isinstance(reserved, KVReserved)
            serving.accept_token("r", SampledToken(token_id))
            serving.note_kv_ended("r", 0)
            expected = [t async for o in serving.generate(PROMPT, GREEDY) for t in o.token_ids]
            assert await tokens_of(stream) == expected

    asyncio.run(main())
