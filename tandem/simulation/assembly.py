"""Assembles engines around the simulated model, with one rank or several; counterpart of `engine.resolve.assemble`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tandem.architecture.model import ModelSpec
from tandem.compute.arena import Arena
from tandem.compute.ranked_pages import RankedPages
from tandem.core.config import SchedulerConfig
from tandem.core.events import BlockEventSink
from tandem.engine.engine import Engine
from tandem.engine.executor import Executor
from tandem.engine.identity import ModelIdentity
from tandem.engine.masks import MaskMaker
from tandem.engine.ranks import Ranks, ShardSizes
from tandem.engine.resolve import Assembly
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.scheduler.scheduler import Scheduler
from tandem.simulation.executor import SimulatedExecutor, StepCost
from tandem.simulation.held_kv import HeldKV
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.model import EOS_TOKEN_ID, FINGERPRINT, KV_SPEC, VOCAB_SIZE
from tandem.simulation.node import Node
from tandem.simulation.rank_links import SimulatedExchange
from tandem.simulation.ranked_executor import SimulatedForward, SimulatedLeader
from tandem.text.decoder_rules import DecoderRules
from tandem.text.tokenizer import Tokenizer

_PIN_SHARE = 0.25  # of a pool, so that pinned blocks move to the host tier


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Sizes of a worker: small, so that blocks run out and prompts are computed in chunks."""

    block_size: int = 8
    num_blocks: int = 96
    num_host_slots: int = 0
    max_model_len: int = 256
    max_num_batched_tokens: int = 48
    max_num_running: int = 8


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Objects from which an engine of a simulated worker is assembled."""

    sizes: WorkerSizes
    loop: VirtualLoop
    node: Node
    cost: StepCost
    emit: BlockEventSink

    def assembled(self) -> tuple[Assembly, SimulatedExecutor]:
        """Assembles an engine of one rank; returns also its executor."""
        layout = build_layout([KV_SPEC], self.sizes.block_size)
        arena = Arena(layout, self.sizes.num_blocks + 1, torch.device("cpu"))
        executor = SimulatedExecutor(arena, self.node, self.loop, self.cost)
        return self._around(executor, layout, arena, RankedPages.of(arena), None), executor

    def assembled_of(self, ranks: Ranks) -> tuple[Assembly, SimulatedForward]:
        """Assembles the engine that leads these ranks; returns also its own forward pass. Runs in a fiber, since it
        waits for the other ranks.
        """
        num_ranks, num_pages = ranks.links.group.num_ranks, self.sizes.num_blocks + 1
        ranked = RankedLayout(build_layout([KV_SPEC], self.sizes.block_size), num_ranks)
        pages = ranks.take_pages(num_ranks, num_pages, ranked.page_bytes)
        arena = Arena(ranked.layout_of(0), num_pages, torch.device("cpu"), pages[0])
        exchange = cast(SimulatedExchange, ranks.links.group)
        held = HeldKV(arena.pages, self.sizes.block_size, 0, num_ranks)
        forward = SimulatedForward(held, self.sizes.block_size, exchange, self.node, self.cost)
        ranks.prepare(FINGERPRINT, ShardSizes(num_pages, self.sizes.max_model_len, self.sizes.max_num_running))
        executor = ranks.lead(SimulatedLeader(forward))
        return self._around(executor, arena.layout, arena, RankedPages(ranked, pages), ranks.renew), forward

    def _around(
        self,
        executor: Executor,
        layout: KVLayout,
        arena: Arena,
        pages: RankedPages,
        on_ranks_lost: Callable[[], None] | None,
    ) -> Assembly:
        sizes = self.sizes
        kv = KVCacheManager(
            layout,
            sizes.num_blocks,
            max_chunk_tokens=sizes.max_num_batched_tokens,
            watermark_pages=int(sizes.num_blocks * 0.01),
            pin_share=_PIN_SHARE,
            emit=self.emit,
        )
        limits = SchedulerConfig(
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_running=sizes.max_num_running,
            max_num_waiting=4096,
            max_model_len=sizes.max_model_len,
        )
        engine = Engine(
            executor,
            Scheduler(limits, kv),
            kv,
            ModelIdentity(FINGERPRINT, VOCAB_SIZE, (EOS_TOKEN_ID,)),
            tokenizer=simulated_tokenizer(),
            clock=self.node,
            on_ranks_lost=on_ranks_lost,
        )
        # NOTE: nobody looks at the weights' spec, nor makes masks
        return Assembly(engine, arena, cast(ModelSpec, None), cast(MaskMaker, None), pages)


@functools.cache
def simulated_tokenizer() -> Tokenizer:
    """Tokenizer with one token a byte, then three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ("<|a|>", "<|b|>", "<|end|>")
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in specials])
    return Tokenizer(backend, DecoderRules(byte_level=True), {})
