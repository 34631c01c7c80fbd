"""A prefill worker towards readers that leave, are slow, or ask for what is not theirs: nothing stays held."""

import asyncio
import uuid
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.errors import CapacityError, EngineStoppedError, InvalidRequestError, TransportError, UnavailableError
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import UNSCOPED
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    GenerateCall,
    LeaseCall,
    PrefillCall,
    PrefillUpdate,
    WorkerAddress,
)
from tests.helpers.workers import (
    GREEDY,
    LONG,
    TIMEOUT_S,
    Pair,
    at_rest,
    generated,
    pair_of,
    prompt_of,
    service_of,
    until,
)

PROMPT = prompt_of(90)
READER = WorkerAddress("reader", "127.0.0.1:1", "x")


def call_of(**fields: object) -> PrefillCall:
    values = {
        "request_id": "r",
        "reader": READER,
        "prompt_token_ids": PROMPT,
        "params": GREEDY,
        "scope": UNSCOPED,
        **fields,
    }
    return PrefillCall(**values)  # type: ignore[arg-type]


async def prefilled(pair: Pair, call: PrefillCall) -> list[PrefillUpdate]:
    async with asyncio.timeout(10):
        return [update async for update in pair.to_prefill.prefill(call)]


async def usage_of(pair: Pair) -> tuple[int, int, int]:
    usage = await pair.prefill.core.engine.call(lambda engine: engine.kv_usage)
    return usage.used, usage.leased, usage.transferring


async def hashes_of(pair: Pair, num_tokens: int = len(PROMPT)) -> tuple[bytes, ...]:
    fingerprint = pair.prefill.reports.model.fingerprint
    hashes: list[bytes] = []
    root = root_hash(UNSCOPED, model_fingerprint=fingerprint, block_size=8)
    extend_hashes(root, hashes, PROMPT[:num_tokens], 8)
    return tuple(hashes)


def test_chunks_the_token_and_the_timeline_come_in_order(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            *chunks, token, end = await prefilled(pair, call_of())
            leases = [update.lease for update in chunks if update.lease is not None]
            assert [lease.num_tokens for lease in leases] == [32, 64, 90]
            assert [lease.is_last for lease in leases] == [False, False, True]
            assert [lease.groups[0].first_index for lease in leases] == [0, 4, 8]
            assert token.token is not None
            assert token.num_cached_tokens == 0
            assert end.timeline
            assert await usage_of(pair) == (0, 12, 0)
            await pair.to_prefill.release([leases[0].lease_id])
            await at_rest(pair.prefill)

    asyncio.run(main())


@pytest.mark.parametrize("num_news", [1, 2, 3, 4])
def test_a_reader_that_leaves_frees_all(llama: Path, num_news: int) -> None:
    async def main() -> None:
        # NOTE: the worker may have been done by then: what it leased then ends by its time
        async with pair_of(llama, lease_ttl_s=1) as pair, aclosing(pair.to_prefill.prefill(call_of())) as stream:
            for _ in range(num_news):
                await anext(stream)
            await stream.aclose()
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_a_reader_that_leaves_before_the_first_chunk_frees_all(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            engine = pair.prefill.core.engine
            await engine.call(lambda e: e.kv.borrow("taken", 10_000))
            task = asyncio.create_task(prefilled(pair, call_of()))
            await until(lambda: is_waiting(pair), "a request that waits")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.call(lambda e: e.kv.drop("taken"))
            await at_rest(pair.prefill)

    asyncio.run(main())


async def is_waiting(pair: Pair) -> bool:
    return await pair.prefill.core.engine.call(lambda engine: engine.num_waiting) == 1


def test_a_reader_that_is_told_all_and_never_comes_back_loses_its_lease(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama, lease_ttl_s=1) as pair:
            *_, last, _, _ = await prefilled(pair, call_of())
            assert last.lease is not None
            assert (await usage_of(pair))[1] == 12
            await at_rest(pair.prefill)
            assert pair.prefill.core.leases.num_expired == 1
            assert not (await pair.to_prefill.confirm(ConfirmCall(lease_id=last.lease.lease_id))).is_valid
            assert list(await pair.to_prefill.renew([last.lease.lease_id])) == [last.lease.lease_id]
            await pair.to_prefill.release([last.lease.lease_id])

    asyncio.run(main())


def test_a_lease_that_ends_in_the_middle_of_its_prefill_ends_the_call_and_frees_all(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            stream = aiter(service_of(pair.prefill).prefill(call_of()))
            first = await anext(stream)
            assert first.lease is not None
            await pair.to_prefill.release([first.lease.lease_id])
            with pytest.raises(TransportError, match="not renewed"):
                await anext(stream)
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_waiting_for_the_first_chunk_does_not_use_up_the_lease(llama: Path) -> None:
    """The lease was opened when the call came: a queue longer than its time ended it before anyone could renew it."""

    async def main() -> None:
        async with pair_of(llama, lease_ttl_s=2) as pair:
            engine = pair.prefill.core.engine
            await engine.call(lambda e: e.kv.borrow("taken", 10_000))
            task = asyncio.create_task(prefilled(pair, call_of()))
            await until(lambda: is_waiting(pair), "a request that waits")
            _, pending = await asyncio.wait([task], timeout=2.3)
            assert pending
            await engine.call(lambda e: e.kv.drop("taken"))
            assert len(await task) == 5

    asyncio.run(main())


def test_cached_blocks_are_leased_until_released(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            await generated(
                pair.to_prefill, GenerateCall(request_id="g", prompt_token_ids=PROMPT, params=GREEDY, scope=UNSCOPED)
            )
            hashes = await hashes_of(pair)
            call = LeaseCall(reader=READER, lease_id=uuid.uuid4().hex, block_hashes=hashes)
            lease = await pair.to_prefill.lease(call)
            assert (lease.num_tokens, len(lease.groups[0].block_ids)) == (88, 11)
            assert await usage_of(pair) == (0, 11, 0)
            answer = await pair.to_prefill.confirm(
                ConfirmCall(lease_id=lease.lease_id, checksum_block_ids=lease.groups[0].block_ids)
            )
            assert answer.is_valid
            assert len(set(answer.checksums)) == 11
            with pytest.raises(CapacityError, match="taken"):
                await pair.to_prefill.lease(call)
            assert await usage_of(pair) == (0, 11, 0), "the first holder lost its blocks to the second"
            await pair.to_prefill.release([lease.lease_id])
            await at_rest(pair.prefill)

    asyncio.run(main())


@pytest.mark.parametrize("salted", [b"", b"not here"])
def test_what_is_not_cached_is_not_leased(llama: Path, salted: bytes) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            hashes = tuple(bytes(32) for _ in range(3)) if salted else ()
            lease = await pair.to_prefill.lease(
                LeaseCall(reader=READER, lease_id=uuid.uuid4().hex, block_hashes=hashes)
            )
            assert lease.num_tokens == 0
            assert not any(group.block_ids for group in lease.groups)
            await at_rest(pair.prefill)

    asyncio.run(main())


@pytest.mark.parametrize("lease_id", ["fetch 1", "measuring p0 1", "x", "A" * 32, "0" * 33])
def test_a_lease_cannot_take_the_name_of_a_transfer(llama: Path, lease_id: str) -> None:
    """Names of leases and of transfers' holds share a namespace: one ended the engine, or freed a destination."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            await generated(
                pair.to_prefill, GenerateCall(request_id="g", prompt_token_ids=PROMPT, params=GREEDY, scope=UNSCOPED)
            )
            engine = pair.prefill.core.engine
            assert await engine.call(lambda e: e.kv.borrow("fetch 1", 2))
            hashes = await hashes_of(pair)
            with pytest.raises(InvalidRequestError, match="lease_id"):
                await pair.to_prefill.lease(LeaseCall(reader=READER, lease_id=lease_id, block_hashes=hashes))
            with pytest.raises(InvalidRequestError, match="lease_id"):
                await prefilled(pair, call_of(lease_id=lease_id))
            await pair.to_prefill.release([lease_id])
            assert await usage_of(pair) == (0, 0, 2)

    asyncio.run(main())


@pytest.mark.parametrize("stray", [0, 10**6, 2**32 - 1, None])
def test_checksums_are_of_the_leases_own_blocks_only(llama: Path, stray: int | None) -> None:
    """None: a block of the same worker's that another request owns."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            (others,) = await pair.prefill.core.engine.call(lambda e: e.kv.borrow("another", 1))
            *_, last, _, _ = await prefilled(pair, call_of())
            assert last.lease is not None
            leased = last.lease.groups[0].block_ids
            call = ConfirmCall(lease_id=last.lease.lease_id, checksum_block_ids=leased)
            assert (await pair.to_prefill.confirm(call)).is_valid
            call = replace(call, checksum_block_ids=(*leased, others if stray is None else stray))
            assert await pair.to_prefill.confirm(call) == ConfirmAnswer(False)

    asyncio.run(main())


def test_unknown_leases_are_invalid_and_harmless(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            assert not (
                await pair.to_prefill.confirm(ConfirmCall(lease_id="nobody's", checksum_block_ids=(1,)))
            ).is_valid
            assert list(await pair.to_prefill.renew(["a", "b"])) == ["a", "b"]
            await pair.to_prefill.release(["a", "a"])
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_a_prompt_whose_blocks_are_taken_from_it_is_refused_and_freed(llama: Path) -> None:
    """Three leased prompts that do not fit together: those that lose theirs say so, the others are served."""

    async def main() -> None:
        small = {"kv_cache_gib": 30 * 12288 / 2 / 2**30, "max_model_len": 128, "prefix_caching": False}
        async with pair_of(llama, prefill=small, lease_ttl_s=1) as pair:
            calls = [call_of(request_id=str(i), prompt_token_ids=prompt_of(100, i)) for i in range(6)]
            results = await asyncio.gather(*(prefilled(pair, call) for call in calls), return_exceptions=True)
            assert all(isinstance(result, list | CapacityError) for result in results)
            assert any(isinstance(result, list) for result in results)
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_an_engine_that_stops_in_the_middle_ends_every_call(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            decoding = asyncio.create_task(
                generated(
                    pair.to_decode, GenerateCall(request_id="g", prompt_token_ids=PROMPT, params=LONG, scope=UNSCOPED)
                )
            )
            await until(lambda: is_running(pair), "a running request")
            await asyncio.to_thread(pair.decode.core.engine.stop)
            with pytest.raises(EngineStoppedError):
                await decoding
            assert pair.decode.lifecycle.num_working == 0
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.Event().wait()  # the worker ends itself

    with pytest.raises(ExceptionGroup) as raised:  # NOTE: the worker itself ends with its engine
        asyncio.run(main())
    assert raised.group_contains(EngineStoppedError)


async def is_running(pair: Pair) -> bool:
    return await pair.decode.core.engine.call(lambda engine: engine.num_running) == 1


def test_a_draining_worker_refuses_new_work_and_finishes_the_old(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            stream = pair.to_prefill.prefill(call_of())
            first = await anext(stream)
            assert first.lease is not None
            await pair.to_prefill.drain()
            with pytest.raises(UnavailableError, match="draining"):
                await prefilled(pair, call_of(request_id="late"))
            with pytest.raises(UnavailableError, match="draining"):
                await pair.to_prefill.lease(LeaseCall(reader=READER, lease_id="0" * 32, block_hashes=()))
            draining = asyncio.create_task(pair.prefill.drain(10.0))
            rest = [update async for update in stream]
            assert rest[-2].token is not None
            assert pair.prefill.core.leases.is_valid(first.lease.lease_id), "a lease was not waited for"
            assert not draining.done()
            await pair.to_prefill.release([first.lease.lease_id])
            assert await draining
            assert (await pair.to_prefill.status()).state.draining

    asyncio.run(main())


def test_a_reader_can_end_a_lease_of_which_it_never_heard(llama: Path) -> None:
    """All updates may lie in buffers when the reader goes: the worker is done, and cannot know that none was read."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            lease_id = uuid.uuid4().hex
            *_, last, _, _ = await prefilled(pair, call_of(lease_id=lease_id))
            assert last.lease is not None
            assert last.lease.lease_id == lease_id
            with pytest.raises(CapacityError, match="taken"):
                await prefilled(pair, call_of(lease_id=lease_id))
            assert await usage_of(pair) == (0, 12, 0)
            await pair.to_prefill.release([lease_id])
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_a_call_that_is_left_ends_its_lease_with_its_hold(llama: Path) -> None:
    """A lease that outlived its hold would be confirmed for blocks that belong to others by then."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            stream = service_of(pair.prefill).prefill(call_of())
            first = await anext(aiter(stream))
            assert first.lease is not None
            await stream.aclose()  # type: ignore[attr-defined]
            assert not pair.prefill.core.leases.is_valid(first.lease.lease_id)
            await at_rest(pair.prefill)

    asyncio.run(main())


def test_a_call_that_is_cancelled_twice_frees_all(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its certificate is withdrawn, and its caller leaves while what it began is still being ended."""
    forgotten: list[str] = []
    monkeypatch.setattr("tandem.worker.service.forget_draft_state", lambda _, engine_id: forgotten.append(engine_id))

    async def main() -> None:
        ending = asyncio.Event()

        async def is_ended_late(*_: "asyncio.Task[None]") -> None:
            ending.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("tandem.worker.service.ended", is_ended_late)
        async with pair_of(llama, lease_ttl_s=60) as pair:
            stream = service_of(pair.prefill).prefill(call_of())
            assert (await anext(aiter(stream))).lease is not None
            closing = asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]
            async with asyncio.timeout(TIMEOUT_S):
                await ending.wait()
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await at_rest(pair.prefill)
            assert len(forgotten) == 1

    asyncio.run(main())


def test_a_change_of_the_lifecycle_is_told_at_once_though_a_report_was_just_being_sent(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, aclosing(service_of(pair.prefill).watch(3600.0)) as reports:
            assert (await anext(reports)).lifecycle == "ready"
            pair.prefill.lifecycle.drain()
            async with asyncio.timeout(TIMEOUT_S):
                assert (await anext(reports)).lifecycle == "draining"

    asyncio.run(main())
