"""Reads into reserved blocks: a block counts once, and none is given back while something may write it."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.clock import SystemClock
from tandem.core.errors import CapacityError, TandemError, TransportError
from tandem.core.output import RequestOutput
from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.rpc.messages import ConfirmAnswer, ConfirmCall, LeaseUpdate, WorkerAddress
from tandem.scheduler.output import KVReserved
from tandem.scheduler.request import Handoff
from tandem.transport.base import Peer
from tandem.transport.reshard import Resharding
from tandem.transport.transfer import Transfer
from tandem.worker.fetch import Fetch
from tandem.worker.source import KVSource
from tests.helpers.layouts import layout_of
from tests.helpers.workers import GREEDY, Pair, at_rest, pair_of, prompt_of, until

PROMPT = prompt_of(40)  # five blocks
ENDED = ConfirmAnswer(False)


@dataclass
class HandMoved:
    """A transport whose reads the test ends, and a peer that confirms what the test says."""

    name: str = "by hand"
    reads: list[tuple[list[int], list[int], Transfer]] = field(default_factory=list)
    answers: list[ConfirmAnswer] = field(default_factory=list)

    def read(self, peer: Peer, remote: list[int], local: list[int], deadline_s: float | None = None) -> Transfer:
        transfer = Transfer(len(remote), SystemClock())
        self.reads.append((list(remote), list(local), transfer))
        return transfer

    async def confirm(self, call: ConfirmCall, *, timeout_s: float | None = None) -> ConfirmAnswer:
        return self.answers.pop(0)

    def disconnect(self, peer: Peer) -> None:
        raise AssertionError("nobody lost it")


def source_of(moved: HandMoved) -> KVSource:
    address = WorkerAddress("p", "127.0.0.1:1", "x")
    client: Any = moved
    transport: Any = moved
    ranked = RankedLayout(layout_of(None), 1)
    peer = Peer("by hand", "x", 100, 1, ranked.layout.page_bytes)
    return KVSource(address, client, transport, peer, Resharding(ranked, 10_000, peer))


def lease_of(first: int, count: int) -> LeaseUpdate:
    groups = (BlockRange(first, tuple(range(50 + first, 50 + first + count))),)
    return LeaseUpdate(lease_id="l", num_tokens=(first + count) * 8, groups=groups, is_last=False, ttl_s=10)


async def reserved_in(pair: Pair) -> tuple[Fetch, KVReserved, Any]:
    core = pair.decode.core
    stream = core.engine.stream(PROMPT, GREEDY, handoff=Handoff(num_expected_tokens=40))
    reserved = await anext(stream)
    assert isinstance(reserved, KVReserved)
    return Fetch(core, reserved, []), reserved, stream


def checksums_of(pair: Pair, local: list[int]) -> tuple[int, ...]:
    return tuple(pair.decode.core.checksums.arrived([(0, (block_id,)) for block_id in local], (1, ())))


async def valid(pair: Pair, moved: HandMoved, local: list[int]) -> None:
    """The peer's checksums are those of what lies here."""
    moved.answers.append(ConfirmAnswer(True, checksums_of(pair, local)))


def run(scenario: Any, llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            await scenario(pair, *await reserved_in(pair))

    asyncio.run(main())


async def is_pinned(pair: Pair) -> bool:
    usage = await pair.decode.core.engine.call(lambda engine: engine.kv_usage)
    return usage.transferring > 0


def test_leading_blocks_count_when_they_are_confirmed(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(), list(reserved.groups[0].block_ids)
        later = asyncio.create_task(fetch.pull(source_of(moved), lease_of(2, 3)))
        await asyncio.sleep(0)
        assert moved.reads[0][:2] == ([52, 53, 54], local[2:])
        assert fetch.num_arrived_tokens == 0
        await valid(pair, moved, local[2:])
        moved.reads[0][2].succeed()
        await later
        assert fetch.num_arrived_tokens == 0, "what follows a gap cannot be used"
        first = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 2)))
        await asyncio.sleep(0)
        await valid(pair, moved, local[:2])
        moved.reads[1][2].succeed()
        await first
        assert (fetch.num_arrived_tokens, fetch.is_complete) == (40, True)
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)


def test_a_read_that_may_still_write_keeps_its_blocks_pinned_and_others_out(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(), list(reserved.groups[0].block_ids)
        first = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        stuck = moved.reads[0][2]
        stuck.fail(TransportError("timed out"), is_over=False)
        with pytest.raises(TransportError, match="timed out"):
            await first
        with pytest.raises(TransportError, match="may still write"):
            await fetch.pull(source_of(moved), lease_of(0, 2))
        assert len(moved.reads) == 1
        again = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        stuck.settle()
        await until(lambda: has_read(moved, 2), "the second read")
        await valid(pair, moved, local)
        moved.reads[1][2].succeed()
        await again
        assert fetch.is_complete
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)


@dataclass
class Refusing(HandMoved):
    """Refuses all reads but the first."""

    refusal: TandemError = field(default_factory=lambda: TransportError("not connected"))

    def read(self, peer: Peer, remote: list[int], local: list[int], deadline_s: float | None = None) -> Transfer:
        if self.reads:
            raise self.refusal
        return super().read(peer, remote, local, deadline_s)


@pytest.mark.parametrize("refusal", [TransportError("not connected"), CapacityError("too many wait")])
def test_a_read_for_two_ranks_that_is_refused_for_one_is_over_with_the_other(refusal: TandemError) -> None:
    """Regression: where too many reads waited, nobody heard of the one that had begun, and its blocks were free."""
    moved = Refusing(refusal=refusal)
    ranked = RankedLayout(layout_of(None, block_size=8), 2)
    peer = Peer("by hand", "x", 100 * ranked.whole.page_bytes // ranked.piece_bytes, 1, ranked.piece_bytes)
    source = source_of(moved)
    source.peer, source.resharding = peer, Resharding(ranked, 10_000, peer)
    transfer = source.read([(0, 0)], [(50,)], [(7,)], SystemClock())
    assert (transfer.is_over, str(transfer.error)) == (False, str(refusal))
    assert source.is_broken is isinstance(refusal, TransportError)
    ((_, _, begun),) = moved.reads
    begun.succeed()
    assert transfer.is_over


def test_a_read_that_failed_and_is_over_is_asked_for_once_more(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(), list(reserved.groups[0].block_ids)
        twice = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        for number in (1, 2):
            await until(lambda number=number: has_read(moved, number), "a read")  # type: ignore[misc]
            moved.reads[-1][2].fail(TransportError(f"cut {number}"))
        with pytest.raises(TransportError, match="cut 2"):
            await twice
        lost = source_of(moved)
        first = asyncio.create_task(fetch.pull(lost, lease_of(0, 5)))
        await until(lambda: has_read(moved, 3), "a read")
        lost.is_lost = True
        moved.reads[2][2].fail(TransportError("lost"))
        with pytest.raises(TransportError, match="lost"):
            await first
        once = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await until(lambda: has_read(moved, 4), "a read")
        moved.reads[3][2].fail(TransportError("cut"))
        await until(lambda: has_read(moved, 5), "a read")
        await valid(pair, moved, local)
        moved.reads[4][2].succeed()
        await once
        assert fetch.is_complete
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)


async def has_read(moved: HandMoved, number: int) -> bool:
    return len(moved.reads) == number


def test_blocks_stay_pinned_after_the_request_until_every_read_is_over(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved = HandMoved()
        pull = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        fetch.close()
        await stream.aclose()
        assert await is_pinned(pair)
        transfer = moved.reads[0][2]
        transfer.fail(TransportError("disconnected"), is_over=False)
        assert await is_pinned(pair)
        transfer.settle()
        await at_rest(pair.decode)

    run(scenario, llama)


def test_a_block_that_is_offered_twice_is_read_once(llama: Path) -> None:
    """A second read of a block could undo what the first had brought and the source had confirmed."""

    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(), list(reserved.groups[0].block_ids)
        first = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 3)))
        await asyncio.sleep(0)
        other = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        assert [read[1] for read in moved.reads] == [local[:3], local[3:]]
        await fetch.pull(source_of(moved), lease_of(0, 5))
        for number, blocks in enumerate((local[:3], local[3:])):
            await valid(pair, moved, blocks)
            moved.reads[number][2].succeed()
            await (first, other)[number]
        assert fetch.is_complete
        assert len(moved.reads) == 2
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)


@pytest.mark.parametrize("answer", [ENDED, ConfirmAnswer(True), ConfirmAnswer(True, (1, 2, 3, 4, 5))])
def test_what_is_not_confirmed_does_not_count(llama: Path, answer: ConfirmAnswer) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(answers=[answer]), list(reserved.groups[0].block_ids)
        if answer == ENDED:
            moved.answers = [replace(answer, checksums=checksums_of(pair, local))]
        pull = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        moved.reads[0][2].succeed()
        with pytest.raises(TransportError):
            await pull
        assert (fetch.num_arrived_tokens, fetch.is_complete) == (0, False)
        pair.decode.core.engine.note_kv_ended(reserved.request_id, fetch.num_arrived_tokens)
        fetch.close()
        told = [token for update in [one async for one in stream] for token in tokens_of(update)]
        assert len(told) == GREEDY.max_tokens
        await at_rest(pair.decode)

    run(scenario, llama)


def test_a_bit_that_flips_here_after_the_read_is_found(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved, local = HandMoved(), list(reserved.groups[0].block_ids)
        pull = asyncio.create_task(fetch.pull(source_of(moved), lease_of(0, 5)))
        await asyncio.sleep(0)
        await valid(pair, moved, local)
        pair.decode.core.checksums._pages.pages[0].view(torch.uint8)[local[2]].view(-1)[0] ^= 1
        moved.reads[0][2].succeed()
        with pytest.raises(TransportError, match="damaged"):
            await pull
        assert fetch.num_arrived_tokens == 0
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)


def tokens_of(update: object) -> tuple[int, ...]:
    return update.token_ids if isinstance(update, RequestOutput) else ()


def test_blocks_beyond_what_is_said_to_be_computed_are_refused(llama: Path) -> None:
    async def scenario(pair: Pair, fetch: Fetch, reserved: KVReserved, stream: Any) -> None:
        moved = HandMoved()
        lease = LeaseUpdate(lease_id="l", num_tokens=16, groups=lease_of(0, 3).groups, is_last=False, ttl_s=1)
        with pytest.raises(TransportError, match="beyond its 16 tokens"):
            await fetch.pull(source_of(moved), lease)
        assert not moved.reads
        fetch.close()
        await stream.aclose()
        await at_rest(pair.decode)

    run(scenario, llama)
