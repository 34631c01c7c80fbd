"""Pairs of workers of any numbers of ranks, stages and hosts, and the check of what they hand over."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.architecture.state import RecurrentSpec, StateSpec
from tandem.core.timeline import Stage
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.process.ports import free_ports
from tandem.rpc.messages import GenerateCall
from tests.helpers.handoffs import PROMPT, call_of
from tests.helpers.rank_hosts import rank_host
from tests.helpers.workers import GREEDY, SAMPLED, TIMEOUT_S, Pair, at_rest, pair_of

COMPILED: dict[str, Any] = {"native_kernels": True, "attention_backend": "auto", "dtype": "auto"}
Side = int | tuple[int, ...]  # ranks of a stage, stages, hosts, and contexts
BLOCK_SIZE = 8
NUM_BLOCKS = 12  # of the prompt's 90 tokens


def size_of(side: Side) -> tuple[int, int, int, int]:
    """Ranks of a stage, stages, hosts, and contexts."""
    width, num_stages, num_hosts, num_contexts = (*((side,) if isinstance(side, int) else side), 1, 1, 1)[:4]
    return width, num_stages, num_hosts, num_contexts


@asynccontextmanager
async def ranked_pair(path: Path, prefill: Side, decode: Side, **both: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as opened:
        sizes = [_settings(side, opened) for side in (prefill, decode)]
        if any(size["hosts"] > 1 for size in sizes):
            both = {"transport": "auto"} | both
        yield await opened.enter_async_context(pair_of(path, prefill=sizes[0], **sizes[1], **COMPILED | both))


def _settings(side: Side, opened: AsyncExitStack) -> dict[str, Any]:
    """Starts the further hosts, which join as soon as there is a leader."""
    width, num_stages, num_hosts, num_contexts = size_of(side)
    found: dict[str, Any] = {"tp": width, "pp": num_stages, "hosts": num_hosts, "cp": num_contexts, "ranks_bind": None}
    if num_hosts > 1:
        (port,) = free_ports(1, "127.0.0.1", random.Random())
        for _ in range(num_hosts - 1):
            opened.enter_context(rank_host(port))
        found |= {"ranks_bind": f"127.0.0.1:{port}"}
    return found


async def answered(pair: Pair, call: GenerateCall) -> tuple[list[int], list[Stage]]:
    """Tokens, and the transfers that they took."""
    tokens: list[int] = []
    stages: tuple[Stage, ...] = ()
    async with asyncio.timeout(TIMEOUT_S):
        async for update in pair.to_decode.generate(call):
            tokens += update.output.token_ids
            stages = update.timeline or stages
    return tokens, [stage for stage in stages if stage.name == "transfer"]


def moved(transfers: list[Stage]) -> int:
    return sum(int(stage.attributes["num_bytes"]) for stage in transfers)


async def alone(path: Path) -> list[list[int]]:
    """A worker of one rank that computes the prompt itself: greedy and sampled tokens."""
    async with ranked_pair(path, 1, 1) as pair:
        calls = [call_of(pair, params=params, request_id=str(i)) for i, params in enumerate((GREEDY, SAMPLED))]
        found = [await answered(pair, replace(call, prefill=None)) for call in calls]
        assert not any(transfers for _, transfers in found)
        return [tokens for tokens, _ in found]


async def check(
    path: Path, prefill: Side, decode: Side, *, is_shared: bool = False, expected: list[list[int]] | None = None
) -> None:
    """`is_shared`: ranks of a host have one copy of the state, so that it is pulled once for each host, of a stage's
    layers. `expected`: of `alone`, if it is known.
    """
    expected = expected or await alone(path)
    async with ranked_pair(path, prefill, decode) as pair:
        core = pair.decode.core
        is_alike = core.ranked.parts == pair.prefill.core.ranked.parts
        groups = core.ranked.whole.groups
        used_bytes = [_moved_bytes(core.ranked, group, is_alike) for group in range(len(groups))]
        greedy, transfers = await answered(pair, call_of(pair))
        assert greedy == expected[0]
        counters = await core.engine.call(lambda engine: engine.counters)
        assert counters.num_fetched_tokens == len(PROMPT)
        width, num_stages, num_hosts, _ = size_of(decode)
        assert core.ranked.num_ranks == num_stages * (1 if is_shared else width)
        num_copies = num_hosts if is_shared and num_stages == 1 else 1
        whole = sum(used_bytes) * num_copies
        missing = sum(_num_needed(each.spec) * size for each, size in zip(groups, used_bytes, strict=True))
        assert moved(transfers) == missing * num_copies
        again, more = await answered(pair, call_of(pair, params=SAMPLED, request_id="again"))
        assert again == expected[1]
        if not core.ranked.whole.is_bounded:
            assert moved(more) <= whole, "what is held already was pulled again"
        elsewhere, all_of_it = await answered(pair, call_of(pair, salt="another", request_id="elsewhere"))
        assert (elsewhere, moved(all_of_it)) == (greedy, moved(transfers))
        await at_rest(pair.prefill, pair.decode)


def _num_needed(spec: StateSpec) -> int:
    """Blocks that the token after the prompt reads: one recurrent state, those of a window, or all."""
    if isinstance(spec, RecurrentSpec):
        return 1
    window: int | None = getattr(spec, "window", None)
    return NUM_BLOCKS if window is None else NUM_BLOCKS - max(0, len(PROMPT) - window + 1) // BLOCK_SIZE


def _moved_bytes(ranked: RankedLayout, group: int, is_alike: bool) -> int:
    """Of a block. Between workers divided alike whole pages move, of which a stage with fewer layers uses a part."""
    if is_alike:
        return ranked.num_ranks * ranked.pages_per_block(group) * ranked.page_bytes
    return sum(sum(ranked.used_bytes(group, rank)) for rank in range(ranked.num_ranks))
