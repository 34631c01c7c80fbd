"""The asynchronous face under load: callers that leave at any moment, several loops, a stop in the middle.

Whatever happens, every block comes back, nobody hangs (each test has a deadline), and whoever stays gets what it would
get alone.
"""

import asyncio
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tandem.core.errors import EngineStoppedError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.engine.executor import StepHandle
from tandem.scheduler.output import SchedulerOutput
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

DEADLINE_S = 120
NUM_CALLERS = 200
PROMPTS = [f"{'shared prefix of every other prompt ' * (index % 2)}caller {index}" for index in range(10)]
PARAMS = SamplingParams(seed=3, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

T = TypeVar("T")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    """A pool of blocks small enough that requests are preempted now and then."""
    return tiny_engine(checkpoint, kv_cache_bytes=1 << 18)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    engine = tiny_engine(checkpoint)
    ids = {prompt: engine.add_request(prompt, PARAMS) for prompt in PROMPTS}
    outputs = drain(engine)
    return {prompt: token_ids(outputs[request_id, 0]) for prompt, request_id in ids.items()}


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def collect(serving: AsyncEngine, prompt: str, params: SamplingParams = PARAMS) -> list[int]:
    return token_ids([output async for output in serving.generate(prompt, params)])


async def leave_after(serving: AsyncEngine, prompt: str, num_outputs: int) -> None:
    stream = serving.generate(prompt, PARAMS)
    async for _ in stream:
        num_outputs -= 1
        if num_outputs <= 0:
            break
    await stream.aclose()  # type: ignore[attr-defined]


def assert_nothing_is_left(engine: Engine) -> None:
    engine.check()
    assert not engine.has_work
    assert engine.kv_usage.used == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_cancellations_at_random_moments(engine: Engine, expected: dict[str, list[int]], seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            staying: dict[asyncio.Task[list[int]], str] = {}
            doomed: list[asyncio.Task[Any]] = []
            for _ in range(NUM_CALLERS):
                prompt, kind = rng.choice(PROMPTS), rng.random()
                if kind < 0.4:
                    staying[asyncio.create_task(collect(serving, prompt))] = prompt
                elif kind < 0.7:
                    doomed.append(asyncio.create_task(leave_after(serving, prompt, rng.randint(1, 10))))
                else:
                    doomed.append(asyncio.create_task(collect(serving, prompt, ENDLESS)))
                    for _ in range(rng.randint(0, 3)):
                        await asyncio.sleep(0)
                    if rng.random() < 0.5:
                        doomed[-1].cancel()
            await collect(serving, "meanwhile")
            rng.shuffle(doomed)
            for task in doomed:
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(*doomed, return_exceptions=True)
            for task, prompt in staying.items():
                assert await task == expected[prompt]
            await collect(serving, "afterwards")  # its answer proves that the aborts before it were served

    run(main())
    assert_nothing_is_left(engine)


def test_callers_on_several_loops(engine: Engine, expected: dict[str, list[int]]) -> None:
    serving = AsyncEngine(engine)
    serving.start()
    answers: list[tuple[str, list[int]]] = []

    def caller(seed: int) -> None:
        rng = random.Random(seed)

        async def main() -> None:
            prompts = rng.sample(PROMPTS, 6)
            answers.extend(zip(prompts, await asyncio.gather(*(collect(serving, p) for p in prompts)), strict=True))

        run(main())

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    serving.stop()
    assert len(answers) == 30
    assert all(answer == expected[prompt] for prompt, answer in answers)
    assert_nothing_is_left(engine)


def test_a_loop_that_closes_takes_its_requests_along(engine: Engine) -> None:
    """Its callers cannot say goodbye, and once their requests ran on to the end for nobody."""
    serving = AsyncEngine(engine)
    serving.start()
    loop = asyncio.new_event_loop()
    stream = serving.generate("abc", ENDLESS)
    first = loop.run_until_complete(anext(stream))
    loop.close()
    assert first.token_ids
    run(collect(serving, "another"))
    serving.stop()
    assert engine.counters.num_prompt_tokens == len("abc") + len("another")
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_outputs_before", [0, 1, 40])
def test_stopping_in_the_middle(engine: Engine, num_outputs_before: int) -> None:
    async def main() -> list[Any]:
        serving = AsyncEngine(engine)
        serving.start()
        tasks = [asyncio.create_task(collect(serving, prompt, ENDLESS)) for prompt in PROMPTS * 5]
        watched = serving.generate("watched", ENDLESS)
        for _ in range(num_outputs_before):
            await anext(watched)
        await asyncio.to_thread(serving.stop)
        serving.stop()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for result in run(main()):
        assert isinstance(result, EngineStoppedError)
    assert_nothing_is_left(engine)


def test_a_consumer_that_does_not_read_holds_up_nobody(engine: Engine) -> None:
    """Outputs that it has not read are kept for it, at most one answer's worth."""

    async def main() -> list[int]:
        async with AsyncEngine(engine) as serving:
            stream = serving.generate("slow reader", ENDLESS)
            first = await anext(stream)
            for _ in range(15):
                await asyncio.gather(*(collect(serving, prompt) for prompt in PROMPTS))
            assert not engine.has_work
            return token_ids([first] + [output async for output in stream])

    assert len(run(main())) == 200
    assert_nothing_is_left(engine)


def test_a_request_made_too_early_is_not_served_later(engine: Engine) -> None:
    """It was refused, yet once it waited in the inbox and ran for nobody after the start."""

    async def main() -> None:
        serving = AsyncEngine(engine)
        serving.stop()
        with pytest.raises(EngineStoppedError, match="not been started"):
            await collect(serving, "too early")
        serving.start()
        with pytest.raises(EngineStoppedError, match="started before"):
            serving.start()
        assert len(await collect(serving, "in time")) == 16
        await asyncio.to_thread(serving.stop)
        with pytest.raises(EngineStoppedError, match="was stopped"):
            await collect(serving, "too late")

    run(main())
    assert engine.counters.num_prompt_tokens == len("in time")
    assert_nothing_is_left(engine)


class _Panic(BaseException):
    """As a Rust library's panic arrives: not an `Exception`."""


class _Panics:
    def submit(self, step: SchedulerOutput) -> StepHandle:
        raise _Panic("out of luck")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_panic_is_told_to_every_caller(engine: Engine) -> None:
    engine._executor = _Panics()

    async def main() -> list[Any]:
        async with AsyncEngine(engine) as serving:
            return await asyncio.gather(*(collect(serving, prompt) for prompt in PROMPTS), return_exceptions=True)

    for result in run(main()):
        assert isinstance(result, EngineStoppedError)
        assert "out of luck" in str(result)
