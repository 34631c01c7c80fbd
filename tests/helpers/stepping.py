"""The smallest loop that can drive a decoder: one request, a block table of consecutive blocks, greedy tokens.

It stands in for the engine where only the model is under test.
"""

import numpy as np
import torch

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.state import ChosenKVSpec, IndexedLatentSpec, KVSpec, LatentSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.compute.block_sparse import BlocksAsKV
from tandem.compute.entries import EntryInputsBackend, RowsAsKV
from tandem.compute.latents import LatentsAsKV
from tandem.compute.step import AttentionBatch
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.entries import EntriesAsKV
from tandem.compute.torch.recurrent import ReferenceRecurrentBackend
from tandem.compute.torch.sparse import ReferenceIndexedBackend
from tandem.kvcache.spec import build_layout
from tandem.models.decoder import Decoder

REFERENCE: Backends = {
    KVSpec: ReferenceBackend(),
    LatentSpec: LatentsAsKV(ReferenceBackend()),
    IndexedLatentSpec: ReferenceIndexedBackend(),
    ChosenKVSpec: BlocksAsKV(ReferenceBackend()),
    RecurrentSpec: ReferenceRecurrentBackend(),
    RowsSpec: RowsAsKV(ReferenceBackend()),
    EntriesSpec: EntriesAsKV(ReferenceBackend()),
    EntryInputsSpec: EntryInputsBackend(ReferenceBackend()),
}


class Stepper:
    """Args:
    decoder: the model.
    backends: its attention.
    num_tokens: room in the arena.
    """

    def __init__(self, decoder: Decoder, backends: Backends, num_tokens: int, block_size: int = 8) -> None:
        self._decoder = decoder
        self._backends = backends
        self._layout = build_layout(decoder.spec.kv_specs, block_size)
        self._blocks_per_group = -(-num_tokens // block_size)
        num_blocks = self._blocks_per_group * sum(group.pages_per_block for group in self._layout.groups)
        self._arena = Arena(self._layout, 1 + num_blocks, torch.device("cpu"))
        self._num_computed_tokens = 0

    def step(self, token_ids: list[int]) -> torch.Tensor:
        """Computes the next tokens; returns their logits, [num_tokens, vocab] float32."""
        start, end = self._num_computed_tokens, self._num_computed_tokens + len(token_ids)
        positions = torch.arange(start, end)
        by_group = [self._batch(group, positions) for group in range(len(self._layout.groups))]
        batches = [by_group[self._layout.group_of_layer(i)[0]] for i in range(self._layout.num_layers)]
        ids = torch.tensor(token_ids)
        hidden = self._decoder.forward(ids, positions, self._arena.layers, batches, self._backends)
        self._num_computed_tokens = end
        return self._decoder.logits(hidden)

    def generate(self, prompt: list[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """Greedy tokens; the prompt is computed in chunks of `chunk`, or whole."""
        size = chunk or len(prompt)
        for start in range(0, len(prompt), size):
            logits = self.step(prompt[start : start + size])
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step(tokens[-1:])[-1].argmax()))
        return tokens

    def _batch(self, group: int, positions: torch.Tensor) -> AttentionBatch:
        before = sum(each.pages_per_block for each in self._layout.groups[:group])
        block_size, first = self._layout.block_size, 1 + before * self._blocks_per_group
        pages = first + np.arange(self._blocks_per_group * self._layout.groups[group].pages_per_block, dtype=np.int32)
        of_blocks = pages.reshape(-1, self._blocks_per_group).T
        blocks = torch.from_numpy(np.ascontiguousarray(of_blocks[:, 0]))
        end = int(positions[-1]) + 1
        return AttentionBatch(
            query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=blocks[None, :],
            slot_mapping=blocks[positions // block_size].long() * block_size + positions % block_size,
            max_query_len=len(positions),
            max_seq_len=end,
            block_pages={int(each[0]): each for each in of_blocks},
        )
