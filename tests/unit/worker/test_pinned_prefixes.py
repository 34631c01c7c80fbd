"""Prompt caching that keeps its word, on real workers: pins are granted, outlive pressure, end by time and leave
nothing behind. Time is a clock that the tests move.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.architecture.quantisation import read_config
from tandem.architecture.registry import find_family
from tandem.core.clock import ManualClock
from tandem.core.errors import WorkerLostError
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.output import RequestMetrics
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.kvcache.spec import build_layout
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import GenerateCall, LeaseCall, PrefillUpdate
from tandem.transport.inproc import InprocRegistry
from tandem.worker.process import WorkerProcess, serving_worker
from tandem.worker.settings import DecodeSettings
from tests.helpers.callers import WorkerCaller
from tests.helpers.handoffs import PROMPT, alone, call_of
from tests.helpers.workers import (
    GREEDY,
    TIMEOUT_S,
    at_rest,
    front_of,
    generated,
    pair_of,
    prompt_of,
    settings_of,
    until,
)

HOUR_S = 3600.0
ONE = replace(GREEDY, max_tokens=1)


async def served(client: WorkerClient, call: GenerateCall) -> tuple[list[int], RequestMetrics]:
    """A request's tokens and the metrics of its last update."""
    async with asyncio.timeout(TIMEOUT_S):
        updates = [one async for one in client.generate(call)]
    metrics = updates[-1].output.metrics
    assert metrics is not None
    return [token for one in updates for token in one.output.token_ids], metrics


def asking(prompt: tuple[int, ...], *pins: Pin, params: SamplingParams = GREEDY) -> GenerateCall:
    return GenerateCall(request_id="r", prompt_token_ids=prompt, params=params, pins=pins, scope=UNSCOPED)


@contextlib.asynccontextmanager
async def one_worker(path: Path, **overrides: Any) -> AsyncIterator[tuple[WorkerProcess, WorkerClient, ManualClock]]:
    """A worker with 64 blocks, of which 32 may be pinned."""
    clock, settings = ManualClock(), settings_of(DecodeSettings, path, "d0", **{"kv_cache_gib": gib(path), **overrides})
    async with serving_worker(settings, InprocRegistry(), clock) as worker:
        client = WorkerCaller(worker.core.me.address)
        try:
            yield worker, client, clock
        finally:
            await client.close()


def gib(path: Path, num_blocks: int = 64) -> float:
    """Memory of so many blocks of eight tokens, and of four constant states where layers keep one."""
    fields = read_config(path)
    spec = replace(find_family(fields).read_model(fields), dtype="float32")
    layout = build_layout(spec.kv_specs, 8)
    return (num_blocks * layout.page_bytes + 4 * layout.bytes_per_request) / 2**30


async def press(client: WorkerClient) -> None:
    """Evict everything that may be evicted."""
    for seed in range(4):
        await generated(client, asking(prompt_of(200, seed=1000 + seed), params=ONE))


async def num_pinned(worker: WorkerProcess) -> int:
    return await worker.core.engine.call(lambda engine: engine.kv_usage.pinned)


async def num_cached(client: WorkerClient, prompt: tuple[int, ...]) -> int:
    """Reads a prefix without renewing anything."""
    _, metrics = await served(client, asking(prompt, params=ONE))
    return metrics.num_cached_tokens


@pytest.fixture(params=["llama", "gemma3", "granite_hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


# --- time and pressure ------------------------------------------------------------------------------------------------


def test_a_paid_hour_is_an_hour(model: Path) -> None:
    """The promise: under pressure that evicts everything else it is cached at 59 minutes, and gone after 60."""

    async def main() -> None:
        other = prompt_of(90, seed=7)
        async with one_worker(model) as (worker, client, clock):
            tokens, metrics = await served(client, asking(PROMPT, Pin(88, HOUR_S)))
            assert metrics.pins == (Pin(88, HOUR_S),)
            await served(client, asking(other))
            await press(client)
            clock.advance(59 * 60)
            await press(client)
            assert await num_cached(client, other) == 0, "the pressure did not evict"
            again, metrics = await served(client, asking(PROMPT))
            assert (again, metrics.num_cached_tokens) == (tokens, 88)
            clock.advance(60)
            await press(client)
            assert await num_pinned(worker) == 0
            assert await num_cached(client, PROMPT) == 0
            await at_rest(worker)

    asyncio.run(main())


def test_a_pin_is_renewed_by_those_who_ask_for_it_only(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, client, clock):
            await served(client, asking(PROMPT, Pin(88, HOUR_S)))
            clock.advance(59 * 60)
            _, metrics = await served(client, asking(PROMPT, Pin(48, HOUR_S), params=ONE))
            assert (metrics.pins, metrics.num_cached_tokens) == ((Pin(48, HOUR_S),), 88)
            clock.advance(59 * 60)
            await press(client)
            assert await num_cached(client, PROMPT) == 48
            assert await num_pinned(worker) == 6
            _, metrics = await served(client, asking(PROMPT, Pin(48, 1.0), params=ONE))
            clock.advance(59)
            assert await num_cached(client, PROMPT[:49]) == 48, "a shorter time cut a longer one"

    asyncio.run(main())


def test_whole_blocks_are_granted_in_the_order_they_were_asked_for(model: Path) -> None:
    async def main() -> None:
        async with one_worker(model) as (worker, client, _):
            pins = (Pin(80, 300.0), Pin(17, HOUR_S), Pin(10**6, 300.0), Pin(0, 300.0), Pin(7, 300.0))
            _, metrics = await served(client, asking(PROMPT, *pins))
            assert [pin.num_tokens for pin in metrics.pins] == [80, 16, 88, 0, 0]
            assert [pin.ttl_s for pin in metrics.pins] == [pin.ttl_s for pin in pins]
            assert await num_cached(client, PROMPT[:20]) == 16, "a shorter prefix cannot be served by itself"
            await at_rest(worker)

    asyncio.run(main())


def test_a_window_is_kept_before_the_rest_of_the_prompt_pushes_it_out(gemma3: Path) -> None:
    """A long prompt in a small pool: by its end the windows of its beginning are gone."""

    async def main() -> None:
        long = prompt_of(200)
        async with one_worker(gemma3, kv_cache_gib=gib(gemma3, 48)) as (_, client, _clock):
            _, metrics = await served(client, asking(long, Pin(16, HOUR_S), params=ONE))
            assert metrics.pins == (Pin(16, HOUR_S),)
            await press(client)
            assert await num_cached(client, long[:17]) == 16

    asyncio.run(main())


def test_no_more_than_the_share_is_pinned_and_who_came_first_keeps_it(llama: Path) -> None:
    async def main() -> None:
        prompts = [prompt_of(200, seed=seed) for seed in range(3)]
        async with one_worker(llama) as (worker, client, clock):
            granted = []
            for prompt in prompts:
                _, metrics = await served(client, asking(prompt, Pin(200, 300.0), params=ONE))
                granted += [pin.num_tokens for pin in metrics.pins]
            assert granted == [200, 56, 0]
            assert await num_pinned(worker) == 32
            await press(client)
            assert [await num_cached(client, (*prompt, 6)) for prompt in prompts] == [200, 56, 0]
            clock.advance(300)
            _, metrics = await served(client, asking(prompts[2], Pin(200, 300.0), params=ONE))
            assert metrics.pins == (Pin(200, 300.0),), "what is over takes up room"

    asyncio.run(main())


def test_without_a_share_nothing_is_granted(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, pin_share=0.0) as (worker, client, _):
            _, metrics = await served(client, asking(PROMPT, Pin(88, 300.0)))
            assert metrics.pins == (Pin(0, 300.0),)
            assert await num_pinned(worker) == 0

    asyncio.run(main())


def test_pinned_blocks_yield_to_a_request_that_could_never_run(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, kv_cache_gib=gib(llama, 40), pin_share=0.9) as (worker, client, _):
            for seed in (1, 2):
                await served(client, asking(prompt_of(150, seed=seed), Pin(144, HOUR_S), params=ONE))
            assert await num_pinned(worker) == 36
            long = prompt_of(120, seed=3)
            params = replace(GREEDY, max_tokens=130)
            tokens, metrics = await served(client, asking(long, params=params))
            assert tokens == alone(llama, long, params)
            assert metrics.num_preemptions <= 2, "it gave way again and again"
            left = await num_pinned(worker)
            assert 0 < left <= 40 - 32, "more yielded than was needed, or nothing did"
            usage = await worker.core.engine.call(lambda engine: engine.kv.pinned.blocks.usage)
            assert usage.num_broken == 36 - left
            await at_rest(worker)

    asyncio.run(main())


def test_an_aborted_request_leaves_what_was_granted_until_its_time_is_over(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, client, clock):
            async with contextlib.aclosing(client.generate(asking(PROMPT, Pin(88, 300.0)))) as stream:
                await anext(stream)
            await at_rest(worker)
            assert await num_pinned(worker) == 11
            clock.advance(300)
            await until(lambda: are_pinned(worker, 0), "nothing is pinned past its time, by an idle worker either")

    asyncio.run(main())


async def are_pinned(worker: WorkerProcess, number: int) -> bool:
    return await num_pinned(worker) == number


def test_routers_hear_of_pinned_blocks_as_room_of_an_idle_worker(llama: Path) -> None:
    """A request that needs them would be refused for as long as they are pinned, though they would yield."""

    async def main() -> None:
        async with one_worker(llama) as (worker, client, _):
            await served(client, asking(PROMPT, Pin(88, 300.0)))
            await worker.reports.refresh()
            updates = await client.status()
            assert updates.blocks["pinned"] == 11
            assert sum(updates.blocks.values()) == updates.state.num_total_blocks == updates.state.num_free_blocks == 64

    asyncio.run(main())


# --- the host tier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "share", "tp"),
    [
        *(("llama", 0.2, 1), ("gemma3", 0.5, 1), ("granite_hybrid", 0.3, 1), ("llama", 0.2, 2)),
        pytest.param("granite_hybrid", 0.3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_prefix_that_left_for_the_host_tier_comes_back_bit_by_bit(
    name: str, share: float, tp: int, request: pytest.FixtureRequest
) -> None:
    """The parts of all ranks of a worker."""
    ranks: dict[str, Any] = {} if tp == 1 else {"tp": tp, "native_kernels": True, "attention_backend": "auto"}
    model: Path = request.getfixturevalue(name)

    async def main() -> None:
        prompts = [prompt_of(90, seed=seed) for seed in range(4)]
        tier = {"pin_share": share, "host_kv_gib": gib(model, 200)}
        async with one_worker(model, **tier, **ranks) as (worker, client, clock):
            first = []
            for prompt in prompts:
                tokens, metrics = await served(client, asking(prompt, Pin(88, HOUR_S)))
                first.append(tokens)
                assert metrics.pins == (Pin(88, HOUR_S),), "the host tier has room"
            await until(lambda: has_moved(worker), "blocks in the host tier")
            await press(client)
            clock.advance(59 * 60)
            for prompt, tokens in zip(prompts, first, strict=True):
                again, metrics = await served(client, asking(prompt))
                assert (again, metrics.num_cached_tokens) == (tokens, 88)
            usage = await worker.core.engine.call(lambda engine: engine.kv.pinned.blocks.usage)
            assert usage.num_restored > 0
            clock.advance(60)
            await until(lambda: are_pinned(worker, 0), "the end of all promises")
            usage = await worker.core.engine.call(lambda engine: engine.kv.pinned.blocks.usage)
            assert (usage.num_pinned, usage.num_host) == (0, 0)
            await at_rest(worker)

    asyncio.run(main())


async def has_moved(worker: WorkerProcess) -> bool:
    promised = await worker.core.engine.call(lambda engine: engine.kv.pinned.blocks)
    return promised.usage.num_moved > 0 and not promised.moving_block_ids


def test_prompts_of_one_worker_restore_at_once_and_leave_nothing(llama: Path) -> None:
    """Several readers of one copy, some of which leave."""

    async def main() -> None:
        async with one_worker(llama, pin_share=0.2, host_kv_gib=gib(llama, 64)) as (worker, client, _):
            expected, _ = await served(client, asking(PROMPT, Pin(88, HOUR_S)))
            await served(client, asking(prompt_of(90, seed=5), Pin(88, HOUR_S)))
            await until(lambda: has_moved(worker), "blocks in the host tier")
            await press(client)
            tasks = [asyncio.create_task(served(client, asking(PROMPT))) for _ in range(6)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks[::2], return_exceptions=True)
            assert [(await task)[0] for task in tasks[1::2]] == [expected] * 3
            await at_rest(worker)

    asyncio.run(main())


def test_a_peer_gets_no_lease_on_what_only_the_host_tier_has(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, pin_share=0.2, host_kv_gib=gib(llama, 64)) as (worker, client, _):
            await served(client, asking(PROMPT, Pin(88, HOUR_S)))
            await served(client, asking(prompt_of(90, seed=5), Pin(88, HOUR_S)))
            await until(lambda: has_moved(worker), "blocks in the host tier")
            await press(client)
            root = root_hash(UNSCOPED, model_fingerprint=worker.reports.model.fingerprint, block_size=8)
            hashes: list[bytes] = []
            extend_hashes(root, hashes, PROMPT, 8)
            lease = await client.lease(LeaseCall(reader=worker.core.me, lease_id="0" * 32, block_hashes=tuple(hashes)))
            assert lease.num_tokens < 88
            await client.release([lease.lease_id])
            await at_rest(worker)

    asyncio.run(main())


# --- prefill and decode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, ONE], ids=["answer", "warm-up"])
def test_the_prefill_worker_keeps_what_it_computed_and_the_last_news_say_so(
    llama: Path, params: SamplingParams
) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            call = call_of(pair, params=params, pins=(Pin(48, 300.0), Pin(88, HOUR_S)))
            _, metrics = await served(pair.to_decode, call)
            assert metrics.pins == (Pin(48, 300.0), Pin(88, HOUR_S))
            await at_rest(pair.prefill, pair.decode)
            assert (await num_pinned(pair.prefill), await num_pinned(pair.decode)) == (11, 0)
            _, metrics = await served(pair.to_decode, call_of(pair, request_id="2", params=params, pins=call.pins))
            assert metrics.num_cached_tokens == 88
            assert metrics.pins == (Pin(48, 300.0), Pin(88, HOUR_S))

    asyncio.run(main())


def test_decode_keeps_what_it_computes_when_prefill_is_lost(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        async def lost(updates: PrefillUpdate) -> list[PrefillUpdate]:
            raise WorkerLostError("the prefill worker is gone")

        async with pair_of(llama) as pair, front_of(pair.prefill, change=lost) as front:
            tokens, metrics = await served(pair.to_decode, call_of(pair, front.worker, pins=(Pin(88, HOUR_S),)))
            assert (tokens, metrics.pins) == (expected, (Pin(88, HOUR_S),))
            await at_rest(pair.prefill, pair.decode)
            assert await num_pinned(pair.decode) == 11

    asyncio.run(main())


def test_a_request_that_goes_on_elsewhere_renews_its_pins(llama: Path, expected: list[int]) -> None:
    """The gateway's failover: what was generated is part of the prompt, but not of what may be pinned."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            call = call_of(pair, pins=(Pin(10**6, HOUR_S),))
            await served(pair.to_decode, call)
            resumed = replace(call, request_id="r2", output_token_ids=tuple(expected[:7]))
            tokens, metrics = await served(pair.to_decode, resumed)
            assert (tokens, metrics.pins) == (expected[7:], (Pin(88, HOUR_S),))
            await at_rest(pair.prefill, pair.decode)
            assert await num_pinned(pair.prefill) == 11

    asyncio.run(main())


def test_a_prefill_worker_restores_and_says_that_nothing_was_computed(llama: Path) -> None:
    async def main() -> None:
        tier = {"kv_cache_gib": gib(llama), "pin_share": 0.2, "host_kv_gib": gib(llama)}
        prompts = [prompt_of(90, seed=seed) for seed in (0, 5)]
        async with pair_of(llama, prefill=tier) as pair:
            for prompt in prompts:
                await served(pair.to_decode, call_of(pair, prompt_token_ids=prompt, pins=(Pin(88, HOUR_S),)))
            await until(lambda: has_moved(pair.prefill), "blocks in the host tier")
            await press(pair.to_prefill)
            for prompt in prompts:
                tokens, metrics = await served(pair.to_decode, call_of(pair, prompt_token_ids=prompt))
                assert (tokens, metrics.num_cached_tokens) == (alone(llama, prompt, GREEDY), 88)
            usage = await pair.prefill.core.engine.call(lambda engine: engine.kv.pinned.blocks.usage)
            assert usage.num_restored > 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
