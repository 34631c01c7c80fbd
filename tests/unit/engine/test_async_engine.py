"""The asynchronous face: many callers at once, callers that leave, and an engine that stops or breaks under them."""

import asyncio
from pathlib import Path

import pytest

from tandem.core.errors import EngineStoppedError, InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.executor import Executor, StepHandle
from tandem.scheduler.output import SchedulerOutput
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


async def collect(serving: AsyncEngine, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    return token_ids([output async for output in serving.generate(prompt, params)])


def test_concurrent_callers_get_what_they_would_get_alone(checkpoint: Path) -> None:
    prompts = [f"prompt number {index}" for index in range(12)]
    engine = tiny_engine(checkpoint)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    expected = drain(engine)

    async def run() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            return await asyncio.gather(*(collect(serving, prompt) for prompt in prompts))

    assert asyncio.run(run()) == [token_ids(expected[request_id, 0]) for request_id in ids]
    assert engine.kv_usage.used == 0


def test_choices_all_arrive(checkpoint: Path) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)

    async def run() -> list[int]:
        async with AsyncEngine(tiny_engine(checkpoint)) as serving:
            return [output.index async for output in serving.generate("abc", params) if output.finished]

    assert sorted(asyncio.run(run())) == [0, 1, 2]


def test_a_caller_that_leaves_aborts_its_request(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            stream = serving.generate("abc", ENDLESS)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            assert len(await collect(serving, "another")) == 20
            assert not engine.has_work

    asyncio.run(run())
    engine.check()
    assert engine.kv_usage.used == 0


def test_leaving_the_loop_early_aborts_the_request(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            async for _ in serving.generate("abc", ENDLESS):
                break
            await collect(serving, "another")
            assert not engine.has_work

    asyncio.run(run())


def test_a_cancelled_task_aborts_its_request(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            task = asyncio.create_task(collect(serving, "abc", ENDLESS))
            await collect(serving, "meanwhile")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await collect(serving, "afterwards")
            assert not engine.has_work

    asyncio.run(run())


def test_bad_requests_fail_alone(checkpoint: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(tiny_engine(checkpoint)) as serving:
            good = asyncio.create_task(collect(serving, "good"))
            with pytest.raises(InvalidRequestError, match="empty"):
                await collect(serving, "")
            assert len(await good) == 20

    asyncio.run(run())


def test_it_says_when_it_has_work_and_when_not(checkpoint: Path) -> None:
    said: list[bool] = []

    async def run() -> None:
        serving = AsyncEngine(tiny_engine(checkpoint))
        serving.on_busy = said.append
        async with serving:
            await collect(serving, "prompt")
            while said[-1]:
                await asyncio.sleep(0)
            await collect(serving, "once more")

    asyncio.run(run())
    assert said[:4] == [False, True, False, True]


def test_stopping_ends_streams_with_the_reason(checkpoint: Path) -> None:
    async def run() -> None:
        serving = AsyncEngine(tiny_engine(checkpoint))
        with pytest.raises(EngineStoppedError, match="not been started"):
            await collect(serving, "too early")
        serving.start()
        stream = serving.generate("abc", ENDLESS)
        await anext(stream)
        await asyncio.to_thread(serving.stop)
        with pytest.raises(EngineStoppedError, match="was stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStoppedError, match="was stopped"):
            await collect(serving, "too late")

    asyncio.run(run())


class _BreaksAfter:
    """An executor that fails on its third step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_steps = 0

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self._num_steps += 1
        if self._num_steps == 3:
            raise MemoryError("no memory left")
        return self._executor.submit(step)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_engine_tells_every_caller(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    engine._executor = _BreaksAfter(engine._executor)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            tasks = [asyncio.create_task(collect(serving, prompt, ENDLESS)) for prompt in ("a", "b")]
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineStoppedError)
                assert "MemoryError: no memory left" in str(result)

    asyncio.run(run())
