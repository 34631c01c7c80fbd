"""A prefill worker that takes a prefix from the peer that holds it, or computes it after all."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.output import RequestOutput
from tandem.core.pins import Pin
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.rpc.messages import ConfirmAnswer, GenerateCall, LeaseUpdate, PrefillCall, WorkerAddress
from tandem.scheduler.output import KVReserved
from tandem.scheduler.request import Handoff
from tandem.worker.prefix_fetch import PrefixFetch
from tandem.worker.sources import Sources
from tandem.worker.tasks import ended
from tests.helpers.workers import (
    GREEDY,
    Pair,
    at_rest,
    front_of,
    generated,
    pair_of,
    prompt_of,
    until,
)

PROMPT = prompt_of(90)
HELD = PROMPT[:60]  # seven whole blocks


def call_of(pair: Pair, holder: WorkerAddress | None = None, **fields: object) -> PrefillCall:
    values = {
        "request_id": "r",
        "reader": pair.decode.core.me,
        "prompt_token_ids": PROMPT,
        "params": GREEDY,
        "scope": UNSCOPED,
        **fields,
    }
    holder = holder or pair.decode.core.me
    return PrefillCall(fetch_from=holder, num_fetch_blocks=7, **values)  # type: ignore[arg-type]


async def first_token(pair: Pair, call: PrefillCall) -> int:
    async with asyncio.timeout(10):
        updates = [one async for one in pair.to_prefill.prefill(call)]
    leases = [one.lease for one in updates if one.lease is not None]
    await pair.to_prefill.release([leases[0].lease_id])
    (token,) = [one.token.token_id for one in updates if one.token is not None]
    return token


async def held_by_decode(pair: Pair) -> int:
    """Serves the prefix there; returns the token that follows the whole prompt."""
    await generated(pair.to_decode, GenerateCall(request_id="h", prompt_token_ids=HELD, params=GREEDY, scope=UNSCOPED))
    whole = GenerateCall(request_id="w", prompt_token_ids=PROMPT, params=GREEDY, scope=CacheScope(salt="apart"))
    return (await generated(pair.to_decode, whole))[0]


async def num_fetched(pair: Pair) -> int:
    return (await pair.prefill.core.engine.call(lambda engine: engine.counters)).num_fetched_tokens


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_prefix_is_fetched_and_the_rest_computed(llama: Path, transport: str) -> None:
    async def main() -> None:
        async with pair_of(llama, transport=transport) as pair:
            expected = await held_by_decode(pair)
            assert await first_token(pair, call_of(pair)) == expected
            assert await num_fetched(pair) == 56
            await at_rest(pair.prefill, pair.decode)
            assert await first_token(pair, call_of(pair)) == expected
            assert await num_fetched(pair) == 56, "what is here already was fetched again"
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("num_outputs", [1, 20])
def test_a_continued_request_pins_its_prompt_although_a_peer_had_all_of_it(llama: Path, num_outputs: int) -> None:
    """Regression: KV of a whole prompt counted as that of a worker which computes it, and keeps the pins itself. So a
    request of whole blocks that goes on after its first token was not pinned by anybody.
    """
    prompt, pin = PROMPT[:56], Pin(56, 3600.0)

    async def main() -> None:
        async with pair_of(llama) as pair:
            params = replace(GREEDY, max_tokens=30)
            held = GenerateCall(request_id="h", prompt_token_ids=prompt, params=params, scope=UNSCOPED)
            tokens = await generated(pair.to_decode, held)
            outputs = tuple(tokens[:num_outputs])
            call = call_of(pair, prompt_token_ids=prompt, output_token_ids=outputs, params=params, pins=(pin,))
            updates = [one async for one in pair.to_prefill.prefill(replace(call, num_fetch_blocks=9))]
            (chosen,) = [one for one in updates if one.token is not None]
            assert chosen.token is not None
            assert (chosen.token.token_id, chosen.pins) == (tokens[num_outputs], (pin,))
            assert await num_fetched(pair) >= 56
            usage = await pair.prefill.core.engine.call(lambda engine: engine.kv.pinned.blocks.usage)
            assert usage.num_pinned == 7

    asyncio.run(main())


def test_a_prefix_that_is_gone_is_computed(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            token = await first_token(pair, call_of(pair))
            assert await num_fetched(pair) == 0
            assert token == await held_by_decode(pair)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_holder_that_is_not_there_costs_a_recomputation(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            expected = await held_by_decode(pair)
            gone = WorkerAddress("gone", "127.0.0.1:1", "x")
            assert await first_token(pair, call_of(pair, gone)) == expected
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def beyond(lease: LeaseUpdate) -> LeaseUpdate:
    groups = tuple(replace(group, block_ids=tuple(i + 10**6 for i in group.block_ids)) for group in lease.groups)
    return replace(lease, groups=groups)


@pytest.mark.parametrize("lie", ["beyond", "damaged", "ended", "half"])
def test_a_holder_that_lies_costs_a_recomputation(llama: Path, lie: str) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.decode) as front:
            expected = await held_by_decode(pair)
            if lie == "beyond":
                front.handler.change_lease = beyond
            if lie == "half":
                front.handler.change_lease = lambda lease: replace(lease, num_tokens=24)
            if lie == "damaged":
                front.handler.change_confirm = lambda answer: replace(answer, checksums=(0,) * len(answer.checksums))
            if lie == "ended":
                front.handler.change_confirm = lambda answer: ConfirmAnswer(False)
            assert await first_token(pair, call_of(pair, front.worker)) == expected
            assert await num_fetched(pair) == 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("silent", ["greet", "lease", "confirm"])
def test_a_reader_that_leaves_during_a_fetch_frees_all(llama: Path, silent: str) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.decode, silent={silent}) as front:
            await held_by_decode(pair)
            async with aclosing(pair.to_prefill.prefill(call_of(pair, front.worker))) as stream:
                task = asyncio.ensure_future(anext(stream))
                await until(lambda: was_called(front.handler.calls, silent), silent)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_lease_is_renewed_although_a_probe_overtook_the_call_for_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the holder had said that it knew no such lease, so it ended during a long read."""
    monkeypatch.setattr("tandem.worker.source.PING_INTERVAL_S", 0.01)

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.decode, silent={"confirm"}) as front:
            renewed = front.handler.renewed

            async def forgotten() -> bool:
                return bool(renewed) and any(renewed) and not renewed[-1]

            async def renewed_now() -> bool:
                return bool(renewed[-1])

            front.handler.before_lease = lambda: until(forgotten, "the holder's word that it knows no such lease")
            await held_by_decode(pair)
            async with aclosing(pair.to_prefill.prefill(call_of(pair, front.worker))) as stream:
                task = asyncio.ensure_future(anext(stream))
                await until(lambda: was_called(front.handler.calls, "confirm"), "the end of the read")
                await until(renewed_now, "another renewal", 5)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


async def was_called(calls: list[str], name: str) -> bool:
    return name in calls


@pytest.mark.parametrize("patience", range(3))
def test_a_fetch_that_is_cancelled_before_it_begins_gives_its_reservation_back(llama: Path, patience: int) -> None:
    """Its blocks stayed pinned for ever: nothing of a task that is cancelled at once runs, its `finally` neither."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            core = pair.prefill.core
            stream = core.engine.stream(PROMPT, GREEDY, handoff=Handoff(num_expected_tokens=56))
            reserved = await anext(stream)
            assert isinstance(reserved, KVReserved)
            task = PrefixFetch(core, Sources(core), reserved, []).start(pair.decode.core.me, no_hashes)
            for _ in range(patience):
                await asyncio.sleep(0)
            await ended(task)
            told = [
                updates.token_ids for updates in [one async for one in stream] if isinstance(updates, RequestOutput)
            ]
            assert len(told) == GREEDY.max_tokens, "the engine did not hear that no KV will come"
            await at_rest(pair.prefill)

    asyncio.run(main())


async def no_hashes() -> list[bytes]:
    return []
