"""A prefill worker that sends garbage costs a recomputation and nothing else."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.kvcache.block_table import BlockRange
from tandem.rpc.messages import PrefillUpdate
from tandem.rpc.prefill_messages import ChosenToken
from tests.helpers.handoffs import PROMPT, call_of
from tests.helpers.workers import (
    at_rest,
    front_of,
    generated,
    pair_of,
)


def with_blocks(update: PrefillUpdate, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> PrefillUpdate:
    assert update.lease is not None
    groups = tuple(BlockRange(group.first_index, change(group.block_ids)) for group in update.lease.groups)
    return replace(update, lease=replace(update.lease, groups=groups))


class Lies:
    """False updates that a broken prefill worker may send, by name."""

    @staticmethod
    async def out_of_range(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else with_blocks(update, lambda ids: tuple(i + 10**6 for i in ids))]

    @staticmethod
    async def largest_ids(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else with_blocks(update, lambda ids: (2**32 - 1,) * len(ids))]

    @staticmethod
    async def null_block(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else with_blocks(update, lambda ids: (0, *ids[1:]))]

    @staticmethod
    async def duplicates(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else with_blocks(update, lambda ids: (ids[0],) * len(ids))]

    @staticmethod
    async def huge_lists(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else with_blocks(update, lambda ids: tuple(range(1, 100_000)))]

    @staticmethod
    async def more_groups(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        if update.lease is None:
            return [update]
        return [replace(update, lease=replace(update.lease, groups=update.lease.groups * 3))]

    @staticmethod
    async def no_groups(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update if update.lease is None else replace(update, lease=replace(update.lease, groups=()))]

    @staticmethod
    async def shifted(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        if update.lease is None:
            return [update]
        groups = tuple(BlockRange(group.first_index + 2**31, group.block_ids) for group in update.lease.groups)
        return [replace(update, lease=replace(update.lease, groups=groups))]

    @staticmethod
    async def tokens_go_backwards(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        if update.lease is None:
            return [update]
        return [replace(update, lease=replace(update.lease, num_tokens=200 - update.lease.num_tokens, is_last=True))]

    @staticmethod
    async def no_last_chunk(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [] if update.lease is not None and update.lease.is_last else [update]

    @staticmethod
    async def no_chunk(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [] if update.lease is not None else [update]

    @staticmethod
    async def nothing(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return []

    @staticmethod
    async def no_token(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [] if update.token is not None else [update]

    @staticmethod
    async def two_tokens(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update] if update.token is None else [update, replace(update, token=ChosenToken(7)), update]

    @staticmethod
    async def unknown_token(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update] if update.token is None else [replace(update, token=ChosenToken(199))]

    @staticmethod
    async def huge_token(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update] if update.token is None else [replace(update, token=ChosenToken(2**31 - 1))]

    @staticmethod
    async def everything_twice(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [update, update]

    @staticmethod
    async def other_lease(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        return [
            update
            if update.lease is None
            else replace(update, lease=replace(update.lease, lease_id="of somebody else"))
        ]

    @staticmethod
    async def new_lease_each_time(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        if update.lease is None:
            return [update]
        return [replace(update, lease=replace(update.lease, lease_id=f"lease up to {update.lease.num_tokens}"))]


LIES = [name for name in vars(Lies) if not name.startswith("_")]
HARMLESS = {"tokens_go_backwards", "no_token", "two_tokens", "everything_twice", "more_groups"}


@pytest.mark.parametrize("name", LIES)
def test_garbage_costs_a_recomputation_and_nothing_else(llama: Path, expected: list[int], name: str) -> None:
    async def main() -> None:
        # NOTE: a lease of which the reader was never told ends by its time
        async with pair_of(llama, lease_ttl_s=1) as pair, front_of(pair.prefill, change=getattr(Lies, name)) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            await at_rest(pair.prefill, pair.decode)
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert (counters.num_fetched_tokens >= len(PROMPT) - 1) == (name in HARMLESS)
            assert await generated(pair.to_decode, call_of(pair, salt="again")) == expected

    asyncio.run(main())


def test_chunks_may_come_in_any_order(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        kept: list[PrefillUpdate] = []

        async def reversed_chunks(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
            if update.lease is None:
                return [update]
            kept.append(update)
            return kept[::-1] if update.lease.is_last else []

        async with pair_of(llama) as pair, front_of(pair.prefill, change=reversed_chunks) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert len(kept) > 2
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
