"""A hand-off over real gRPC: same tokens, and nothing held on either side, whatever the prefill worker does."""

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.rpc.messages import GenerateCall, PrefillCall
from tandem.rpc.prompt_reuse import PromptSizes, RememberedPrompts, current_prompt_sizes
from tandem.worker.source import KVSource
from tests.helpers.handoffs import PROMPT, Gate, alone, call_of
from tests.helpers.workers import (
    GREEDY,
    LONG,
    SAMPLED,
    TIMEOUT_S,
    Pair,
    at_rest,
    front_of,
    generated,
    pair_of,
    prompt_of,
    until,
)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("model", "transport"),
    [
        ("llama", "inproc"),
        ("gemma3", "cma"),
        ("gemma3", "tcp"),
        ("gemma4", "cma"),
        ("llama", "nixl"),
        ("int4", "tcp"),
        ("int4", "nixl"),
    ],
)
def test_tokens_are_those_of_one_engine(
    model: str, transport: str, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    prompts = [prompt_of(n, seed=n) for n in (1, 8, 33, 90)]

    async def main() -> None:
        async with pair_of(path, transport=transport) as pair:
            calls = [
                call_of(pair, request_id=str(len(prompt)), prompt_token_ids=prompt, params=params) for prompt in prompts
            ]
            answers = await asyncio.gather(*(generated(pair.to_decode, call) for call in calls))
            assert answers == [alone(path, prompt, params) for prompt in prompts]
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == sum(map(len, prompts))
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_prefill_worker_is_sent_what_is_new_of_a_prompt(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode workers sent the whole of each turn. Names are kept of long prompts only, and this model's are short."""
    sizes: list[int] = []
    whole = RememberedPrompts.whole

    def noted(self: RememberedPrompts, call: Any) -> Any:
        if isinstance(call, PrefillCall):
            sizes.append(len(call.prompt_token_ids) + (0 if call.told is None else len(call.told.more_token_ids)))
        return whole(self, call)

    monkeypatch.setattr(RememberedPrompts, "whole", noted)

    async def main() -> None:
        current_prompt_sizes.set(PromptSizes(min_tokens=40, least_shared=32, lengths=(32,)))
        async with pair_of(llama) as pair:
            for length in (50, 63, 90):
                call = call_of(pair, request_id=str(length), prompt_token_ids=PROMPT[:length])
                assert await generated(pair.to_decode, call) == alone(llama, PROMPT[:length], GREEDY)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
    assert sizes == [50, 13, 27]


def test_a_prefill_worker_needs_no_drafter_of_its_own(llama: Path) -> None:
    params = replace(GREEDY, speculate="ngram")

    async def main() -> None:
        async with pair_of(llama, prefill={"speculate": "off"}, speculate="ngram") as pair:
            assert await generated(pair.to_decode, call_of(pair, params=params)) == alone(llama, PROMPT, GREEDY)
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)

    asyncio.run(main())


@pytest.mark.parametrize("is_lost", [False, True], ids=["arrives", "is lost"])
def test_a_prompt_asked_for_again_waits_for_its_hand_off(llama: Path, expected: list[int], is_lost: bool) -> None:
    """The router takes a prompt that it has just sent for one that decode has.

    A lost prefill worker cannot be told that its lease is over, so that lease ends by its time. On a quick machine all
    of the prompt was leased by then and the test waited less than that.
    """
    terms = {"lease_ttl_s": 1} if is_lost else {}

    async def main() -> None:
        gate = Gate(1)
        async with pair_of(llama, prefill=terms) as pair, front_of(pair.prefill, change=gate) as front:
            engine = pair.decode.core.engine

            async def is_reserved() -> bool:
                return await engine.call(lambda engine: engine.kv_usage.transferring > 0)

            async def is_waiting() -> bool:
                return await engine.call(lambda engine: engine.num_waiting == 1)

            async def is_leased() -> bool:
                return gate.reached.is_set() and not pair.prefill.lifecycle.num_working

            first = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker, request_id="0")))
            await until(is_reserved, "blocks for the hand-off")
            again = replace(call_of(pair, request_id="1"), prefill=None)
            second = asyncio.create_task(generated(pair.to_decode, again))
            await until(is_waiting, "the prompt asked for again is held back")
            await until(is_leased, "the whole prompt is computed, and told as far as the gate")
            if is_lost:
                await front.server.stop(0.0)
            gate.opened.set()
            assert (await first, await second) == (expected, expected)
            counters = await engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == (0 if is_lost else len(PROMPT))
            assert counters.num_cached_prompt_tokens == len(PROMPT) // 8 * 8
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_an_answer_begun_elsewhere_continues(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            call = call_of(pair, output_token_ids=tuple(expected[:4]))
            assert await generated(pair.to_decode, call) == expected[4:]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_lease_ends_when_the_kv_turns_out_to_be_here_already(llama: Path) -> None:
    """Nobody told the hand-off that nothing was missing: it kept its lease to the answer's end."""

    async def main() -> None:
        prompt = PROMPT[:64]  # whole blocks: with the first token known, all of it can come from the cache
        async with pair_of(llama, max_num_running=1, lease_ttl_s=60) as pair:
            await generated(
                pair.to_decode, GenerateCall(request_id="c", prompt_token_ids=prompt, params=GREEDY, scope=UNSCOPED)
            )
            engine = pair.decode.core.engine
            running = engine.stream(prompt_of(20, seed=9), replace(LONG, max_tokens=230), request_id="first")
            await anext(running)
            over = threading.Event()
            call = call_of(pair, prompt_token_ids=prompt, params=LONG)
            stream = pair.to_decode.generate(call)
            first = list((await anext(stream)).output.token_ids)
            assert len(first) == 1
            assert await engine.call(lambda e: e.num_waiting) == 1, "the other ended too soon for this test"
            await running.aclose()
            second = list((await anext(stream)).output.token_ids)
            await engine.call(lambda e: None)
            assert second
            assert await engine.call(lambda e: e.counters.num_fetched_tokens) == 0
            engine.post(lambda e: wait_for(over))
            try:
                await at_rest(pair.prefill)
            finally:
                over.set()
            rest = [t async for update in stream for t in update.output.token_ids]
            assert [*first, *second, *rest] == alone(llama, prompt, LONG)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_prompt_without_room_here_gives_its_lease_back(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests waited for each other for ever: one's blocks at the prefill worker were leased for as long as it
    found no room here, and the other had that room and waited for the prefill worker's blocks.
    """
    monkeypatch.setattr("tandem.worker.remote_prefill.ROOM_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with pair_of(llama, max_num_running=1, lease_ttl_s=60) as pair:
            engine = pair.decode.core.engine
            running = engine.stream(prompt_of(20, seed=9), replace(LONG, max_tokens=230), request_id="first")
            await anext(running)
            stream = pair.to_decode.generate(call_of(pair, params=LONG))
            first = list((await anext(stream)).output.token_ids)
            assert await engine.call(lambda e: e.num_waiting) == 1, "the other ended too soon for this test"
            held = threading.Event()
            engine.post(lambda e: wait_for(held))
            try:
                await at_rest(pair.prefill)
            finally:
                held.set()
            assert await engine.call(lambda e: e.num_waiting) == 1, "the other ended too soon for this test"
            await running.aclose()
            rest = [t async for update in stream for t in update.output.token_ids]
            assert [*first, *rest] == alone(llama, PROMPT, LONG)
            assert await engine.call(lambda e: e.counters.num_fetched_tokens) == 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_lease_of_a_source_that_takes_no_reads_does_not_wait_for_room(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same two waited for each other where another request's read had broken the connection: what had been leased
    was not given up until there was room for a read that could not succeed.
    """
    sources: list[KVSource] = []

    class RecordedSource(KVSource):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            sources.append(self)

    monkeypatch.setattr("tandem.worker.sources.KVSource", RecordedSource)

    async def main() -> None:
        gate = Gate(2)
        async with (
            pair_of(llama, max_num_running=1, lease_ttl_s=60) as pair,
            front_of(pair.prefill, change=gate) as front,
        ):
            engine = pair.decode.core.engine
            running = engine.stream(prompt_of(20, seed=9), replace(LONG, max_tokens=230), request_id="first")
            await anext(running)
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker)))
            await until(lambda: is_waiting(pair), "the request that finds no room")
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            held = threading.Event()
            engine.post(lambda e: wait_for(held))
            try:
                (source,) = sources
                source.is_broken = True
                gate.opened.set()
                await at_rest(pair.prefill, timeout_s=5.0)
            finally:
                held.set()
            assert await engine.call(lambda e: e.num_waiting) == 1, "the other ended too soon for this test"
            await running.aclose()
            assert await task == alone(llama, PROMPT, GREEDY)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


async def is_waiting(pair: Pair) -> bool:
    return await pair.decode.core.engine.call(lambda engine: engine.num_waiting) == 1


def wait_for(event: threading.Event) -> None:
    event.wait(60)


# --- the client leaves ------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_while_its_prefill_goes_on(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        gate = Gate(3)
        async with pair_of(llama, lease_ttl_s=3) as pair, front_of(pair.prefill, change=gate) as front:
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker)))
            await asyncio.wait([task], timeout=4.0)
            assert gate.reached.is_set()
            gate.opened.set()
            assert await task == expected
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "num_tokens_told"), [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], ids=lambda value: str(value)
)
def test_a_client_that_leaves_before_the_kv_is_there_frees_all(
    llama: Path, expected: list[int], number: int, num_tokens_told: int
) -> None:
    """Three chunks, the token, the timeline: whichever is missing when the client goes."""

    async def main() -> None:
        gate = Gate(number)
        async with pair_of(llama) as pair, front_of(pair.prefill, change=gate) as front:
            stream = pair.to_decode.generate(call_of(pair, front.worker))
            told: list[int] = []

            async def listen() -> None:
                async for update in stream:
                    told.extend(update.output.token_ids)

            listening = asyncio.create_task(listen())
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            await until(lambda: is_told(told, num_tokens_told), "the first token")
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await at_rest(pair.prefill, pair.decode)
            gate.opened.set()
            assert await generated(pair.to_decode, call_of(pair, salt="next")) == expected

    asyncio.run(main())


async def is_told(told: list[int], number: int) -> bool:
    return len(told) == number


def test_a_client_that_leaves_before_admission_frees_all(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            engine = pair.decode.core.engine
            await pair.to_prefill.status()
            await engine.call(lambda e: e.kv.borrow("taken", 10_000))
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair)))
            await until(lambda: is_leasing(pair), "the lease of a request that waits")
            await leave(task)
            await engine.call(lambda e: e.kv.drop("taken"))
            await at_rest(pair.prefill, pair.decode)
            assert await generated(pair.to_decode, call_of(pair)) == expected

    asyncio.run(main())


async def is_leasing(pair: Pair) -> bool:
    usage = await pair.prefill.core.engine.call(lambda engine: engine.kv_usage)
    return usage.leased == -(-len(PROMPT) // 8) and usage.used == 0


async def leave(task: "asyncio.Task[list[int]]") -> None:
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


def test_a_client_that_leaves_during_decode_frees_all(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            stream = pair.to_decode.generate(call_of(pair, params=LONG))
            num_told = 0
            async for update in stream:
                num_told += len(update.output.token_ids)
                if num_told >= 3:
                    break
            await stream.aclose()
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_many_clients_leave_at_random_moments(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with pair_of(llama, prefill={"max_num_batched_tokens": 16}) as pair:
            generator = random.Random(3)
            prompts = [prompt_of(generator.randint(1, 120), seed=seed % 7) for seed in range(40)]
            num_left = 0
            for start in range(0, len(prompts), 8):
                tasks = [
                    asyncio.create_task(
                        generated(pair.to_decode, call_of(pair, request_id=str(i), prompt_token_ids=prompts[i]))
                    )
                    for i in range(start, start + 8)
                ]
                for task in tasks:
                    for _ in range(generator.randrange(25)):
                        await asyncio.sleep(0)
                    if generator.random() < 0.8:
                        task.cancel()
                for index, result in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                    is_left = isinstance(result, asyncio.CancelledError)
                    num_left += is_left
                    assert is_left or result == alone(llama, prompts[start + index], GREEDY)
            assert 10 <= num_left <= 36
            await at_rest(pair.prefill, pair.decode)
            assert await generated(pair.to_decode, call_of(pair)) == expected

    asyncio.run(main())
