"""Prefill workers that lie: it costs a recomputation, never a wrong token, a block or a process."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem.rpc.messages import ConfirmAnswer, PrefillUpdate, WorkerAddress
from tandem.rpc.server import serve_worker
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, Scene, generate_with
from tests.faults.streams import Known
from tests.helpers.callers import WorkerCaller
from tests.helpers.secret import serving_as
from tests.helpers.workers import Middleman

FREE_S = LEASE_TTL_S + 0.5


async def one_more_block(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    """A block that the pool does not have."""
    if update.lease is None:
        return [update]
    groups = tuple(replace(each, block_ids=(*each.block_ids[:-1], 1_000_000)) for each in update.lease.groups)
    return [replace(update, lease=replace(update.lease, groups=groups))]


async def no_groups(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [update if update.lease is None else replace(update, lease=replace(update.lease, groups=()))]


async def two_groups(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [
        update if update.lease is None else replace(update, lease=replace(update.lease, groups=update.lease.groups * 2))
    ]


async def far_away(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    """Blocks of a position that the request does not have."""
    if update.lease is None:
        return [update]
    groups = tuple(replace(each, first_index=each.first_index + 1000) for each in update.lease.groups)
    return [replace(update, lease=replace(update.lease, groups=groups))]


async def half_of_it(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [] if update.lease is not None and update.lease.num_tokens > 500 else [update]


async def no_such_token(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [update if update.token is None else replace(update, token=replace(update.token, token_id=2**30))]


async def as_it_is(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [update]


def damaged(answer: ConfirmAnswer) -> ConfirmAnswer:
    """One bit of the first block differs from what was read."""
    return replace(answer, checksums=tuple(c ^ (i == 0) for i, c in enumerate(answer.checksums)))


def no_checksums(answer: ConfirmAnswer) -> ConfirmAnswer:
    return replace(answer, checksums=())


def ended(answer: ConfirmAnswer) -> ConfirmAnswer:
    return ConfirmAnswer(False)


LIES: dict[str, Callable[[Middleman], None]] = {
    "a damaged block": lambda liar: setattr(liar, "change_confirm", damaged),
    "no checksums": lambda liar: setattr(liar, "change_confirm", no_checksums),
    "a lease that has ended": lambda liar: setattr(liar, "change_confirm", ended),
    "a block that does not exist": lambda liar: setattr(liar, "change", one_more_block),
    "no KV group": lambda liar: setattr(liar, "change", no_groups),
    "a KV group too many": lambda liar: setattr(liar, "change", two_groups),
    "blocks of another position": lambda liar: setattr(liar, "change", far_away),
    "half of the blocks": lambda liar: setattr(liar, "change", half_of_it),
    "a token that does not exist": lambda liar: setattr(liar, "change", no_such_token),
    "silence to every sign of life": lambda liar: liar.silent.add("renew"),
    "silence to every confirmation": lambda liar: liar.silent.add("confirm"),
}
# What a peer says too much is not heeded, and one that ends its work in time need not say that it lives.
HARMLESS = {"a KV group too many", "silence to every sign of life"}
OUTCOMES = {True: "exact, computed by decode", False: "exact, not heeded"}


QUICK = {
    *("a damaged block", "a lease that has ended", "no KV group", "a token that does not exist"),
    *("silence to every confirmation", "a KV group too many"),
}
"""One of what is compared, of leases, of the shape, of tokens and of silence, and one that is harmless."""


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=() if lie in QUICK else pytest.mark.slow) for lie in LIES])
def test_a_lie_costs_a_recomputation(
    small_scene: Scene, small_known: Mapping[float, Known], hidden: WorkerAddress, matrix: Matrix, lie: str
) -> None:
    async def story() -> tuple[list[int], str]:
        async with middleman(hidden, LIES[lie]) as (address, liar):
            token_ids = await generate_with(small_scene, told.asked, address)
            assert "prefill" in liar.calls, "nobody asked the liar"
            return token_ids, address.worker_id

    told = small_known[0.0]
    began_s = time.monotonic()
    token_ids, name = asyncio.run(story())
    took_s = time.monotonic() - began_s
    assert token_ids == told.token_ids
    was_noticed = f"worker {name} failed" in small_scene.cluster.processes["decode-0"].log()
    assert was_noticed or lie in HARMLESS, "the lie was believed"
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    assert all(process.returncode is None for process in small_scene.cluster.processes.values())
    matrix.append(Row("a peer", "hand-off", f"lies: {lie}", OUTCOMES[was_noticed], took_s, None, free_s))


@asynccontextmanager
async def middleman(
    real: WorkerAddress, lie: Callable[[Middleman], None]
) -> AsyncIterator[tuple[WorkerAddress, Middleman]]:
    """A liar before that worker, each time another one."""
    client = WorkerCaller(real.address)
    name = f"liar-{random.getrandbits(32)}"
    liar = Middleman(client, change_greeting=lambda g: replace(g, worker=replace(g.worker, worker_id=name)))
    lie(liar)
    server = await serve_worker(liar, "127.0.0.1:0", serving_as(real.incarnation))
    try:
        yield WorkerAddress(name, server.address), liar
    finally:
        await server.stop(0.0)
        await client.close()


def test_a_middleman_that_does_not_lie_is_believed(
    small_scene: Scene, small_known: Mapping[float, Known], hidden: WorkerAddress
) -> None:
    """Premise of the tests above: blocks do come through the middleman."""

    async def story() -> tuple[list[int], list[str]]:
        async with middleman(hidden, lambda _: None) as (address, liar):
            return await generate_with(small_scene, small_known[0.8].asked, address), liar.released

    before = small_scene.transferred_bytes("decode-0")
    token_ids, released = asyncio.run(story())
    assert token_ids == small_known[0.8].token_ids
    assert len(released) == 1
    assert small_scene.transferred_bytes("decode-0") > before + 20e6
    small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
