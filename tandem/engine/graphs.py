"""Decode steps replayed as CUDA graphs, one for each of a few padded batch sizes.

A graph reads and writes fixed memory, so every step's inputs are copied into static buffers first. Rows past the batch
are requests of one token on the null block with slot -1: they write nothing, and their output is cut off. For a step
that no graph was captured for, `run` returns None.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from tandem.compute.step import AttentionBatch
from tandem.engine.current_device import current_device
from tandem.engine.inputs import ModelInputs

WARM_UP_RUNS = 2  # kernels compile and libraries allocate in these, which capture would forbid
DENSE_STEP = 16  # from this batch size on, sizes are multiples of it

ForwardFunction = Callable[[torch.Tensor, torch.Tensor, Sequence[AttentionBatch]], torch.Tensor]
"""(input_ids [n], positions [n], one batch a KV group) -> hidden [n, hidden_size]"""


def padded_sizes(max_num_requests: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, 16, then every 16, up to and including the maximum."""
    sizes = [1, 2, 4, 8, *range(DENSE_STEP, max_num_requests, DENSE_STEP)]
    return (*takewhile(lambda size: size < max_num_requests, sizes), max_num_requests)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [size, hidden_size]; overwritten by every replay


class DecodeGraphs:
    """Pads decode batches to captured sizes and replays them.

    Args:
        forward: the model's step; must not synchronise with the device.
        sizes: padded batch sizes, ascending.
        num_groups: KV groups, each with its own block tables.
        block_size: tokens a block.
        max_model_len: longest request in tokens. Kernels are launched for this length and stop at each request's own.
        device: where the model runs.
        capture: False calls `forward` on the padded buffers instead, which works on any device.
    """

    def __init__(
        self,
        forward: ForwardFunction,
        sizes: Sequence[int],
        *,
        num_groups: int,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        capture: bool = True,
    ) -> None:
        assert list(sizes) == sorted(set(sizes)), sizes
        assert sizes[0] >= 1, sizes
        self._forward = forward
        self._sizes = tuple(sizes)
        self._capture = capture
        self._device = device
        self._max_model_len = max_model_len
        self._buffers = _Buffers.padding(sizes[-1], num_groups, max_model_len, block_size, device)
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture every size, largest first so that the smaller ones reuse its memory. Call once, before serving."""
        if not self._capture:
            return
        with current_device(self._device):
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(self._sizes):
                self._captured[size] = self._capture_size(size, pool)

    def size_for(self, inputs: ModelInputs) -> int | None:
        """The smallest captured size that fits the step. None: the step has prefill tokens or is too large."""
        batch = inputs.batches[0]
        if batch.max_query_len != 1 or batch.max_seq_len > self._max_model_len:
            return None
        index = bisect_left(self._sizes, batch.num_requests)
        return self._sizes[index] if index < len(self._sizes) else None

    @torch.inference_mode()
    def run(self, inputs: ModelInputs) -> torch.Tensor | None:
        """The hidden states [num_tokens, hidden_size], valid until the next run. None: no graph fits the step."""
        size = self.size_for(inputs)
        if size is None:
            return None
        self._fill(inputs, size)
        return self._replay(size)[: inputs.input_ids.shape[0]]

    def _fill(self, inputs: ModelInputs, size: int) -> None:
        num_tokens = inputs.input_ids.shape[0]
        _copy_padded(self._buffers.input_ids, inputs.input_ids, size, 0)
        _copy_padded(self._buffers.positions, inputs.positions, size, 0)
        for target, source in zip(self._buffers.batches, inputs.batches, strict=True):
            _copy_padded(target.seq_lens, source.seq_lens, size, 1)
            _copy_padded(target.slot_mapping, source.slot_mapping, size, -1)
            target.block_tables[:size].zero_()
            target.block_tables[:num_tokens, : source.block_tables.shape[1]].copy_(source.block_tables)

    def _replay(self, size: int) -> torch.Tensor:
        if not self._capture:
            return self._forward_padded(size)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.hidden

    def _forward_padded(self, size: int) -> torch.Tensor:
        buffers = self._buffers
        batches = [_first_rows(batch, size) for batch in buffers.batches]
        return self._forward(buffers.input_ids[:size], buffers.positions[:size], batches)

    def _capture_size(self, size: int, pool: Any) -> _Captured:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._forward_padded(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = self._forward_padded(size)
        return _Captured(graph, hidden)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Static memory for the largest size."""

    input_ids: torch.Tensor  # [max_size] int64
    positions: torch.Tensor  # [max_size] int64
    batches: tuple[AttentionBatch, ...]

    @classmethod
    def padding(
        cls, max_size: int, num_groups: int, max_model_len: int, block_size: int, device: torch.device
    ) -> "_Buffers":
        """Buffers whose rows are all padding."""
        query_start = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        max_blocks = math.ceil(max_model_len / block_size)
        batches = tuple(
            AttentionBatch(
                query_start=query_start,
                seq_lens=torch.ones(max_size, dtype=torch.int32, device=device),
                block_tables=torch.zeros(max_size, max_blocks, dtype=torch.int32, device=device),
                slot_mapping=torch.full((max_size,), -1, dtype=torch.int64, device=device),
                max_query_len=1,
                max_seq_len=max_model_len,
            )
            for _ in range(num_groups)
        )
        return cls(
            input_ids=torch.zeros(max_size, dtype=torch.int64, device=device),
            positions=torch.zeros(max_size, dtype=torch.int64, device=device),
            batches=batches,
        )


def _first_rows(batch: AttentionBatch, size: int) -> AttentionBatch:
    return replace(
        batch,
        query_start=batch.query_start[: size + 1],
        seq_lens=batch.seq_lens[:size],
        block_tables=batch.block_tables[:size],
        slot_mapping=batch.slot_mapping[:size],
    )


def _copy_padded(target: torch.Tensor, source: torch.Tensor, size: int, padding: int) -> None:
    num_rows = source.shape[0]
    target[:num_rows].copy_(source, non_blocking=True)
    target[num_rows:size].fill_(padding)
