"""From a step's plan to the tensors the model reads.

Keeps a copy of each running request's block tables in preallocated rows and appends only what is new, so that a step
costs per token, not per token of context.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.attention.base import AttentionBatch
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One step, requests concatenated along the token dimension.

    `batches` has one entry a KV group. `sample_rows` are the tokens whose logits choose a token, in scheduled order.
    """

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    batches: tuple[AttentionBatch, ...]
    sample_rows: torch.Tensor  # [num_sampling] int64


class InputBuilder:
    """Builds `ModelInputs` for consecutive steps.

    Args:
        layout: KV groups and block size.
        max_num_requests: requests that run at once.
        max_model_len: longest request in tokens.
        device: where the tensors go.
    """

    def __init__(self, layout: KVLayout, *, max_num_requests: int, max_model_len: int, device: torch.device) -> None:
        max_blocks = math.ceil(max_model_len / layout.block_size)
        self._block_size = layout.block_size
        self._device = device
        self._tables = [np.zeros((max_num_requests, max_blocks), dtype=np.int32) for _ in layout.groups]
        self._rows: dict[str, int] = {}
        self._filled = [0] * max_num_requests
        self._num_dropped = [[0] * len(layout.groups) for _ in range(max_num_requests)]
        self._free_rows = list(range(max_num_requests - 1, -1, -1))

    def build(self, step: SchedulerOutput) -> ModelInputs:
        """The inputs of `step`, which schedules at least one token."""
        for request_id in step.released:
            self._forget(request_id)
        rows = np.array([self._update_row(item) for item in step.scheduled], dtype=np.int64)
        lengths = np.array([item.num_tokens for item in step.scheduled], dtype=np.int64)
        ends = np.array([item.end for item in step.scheduled], dtype=np.int64)
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(query_start[-1]) + (ends - query_start[1:])[owner]
        batches = self._attention_batches(rows, owner, positions, query_start, ends)
        samples = [index for index, item in enumerate(step.scheduled) if item.samples]
        return ModelInputs(
            input_ids=self._tensor(_token_ids(step.scheduled)),
            positions=self._tensor(positions),
            batches=batches,
            sample_rows=self._tensor(query_start[1:][samples] - 1),
        )

    def _attention_batches(
        self, rows: IntArray, owner: IntArray, positions: IntArray, query_start: IntArray, ends: IntArray
    ) -> tuple[AttentionBatch, ...]:
        max_seq_len = int(ends.max())
        num_blocks = math.ceil(max_seq_len / self._block_size)
        starts = self._tensor(query_start.astype(np.int32))
        seq_lens = self._tensor(ends.astype(np.int32))
        max_query_len = int(np.diff(query_start).max())
        block_index, offset = np.divmod(positions, self._block_size)
        batches = []
        for table in self._tables:
            block_tables = table[rows, :num_blocks]
            slots = block_tables[owner, block_index].astype(np.int64) * self._block_size + offset
            batches.append(
                AttentionBatch(
                    query_start=starts,
                    seq_lens=seq_lens,
                    block_tables=self._tensor(block_tables),
                    slot_mapping=self._tensor(slots),
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                )
            )
        return tuple(batches)

    def _update_row(self, item: ScheduledRequest) -> int:
        """Copy what has changed since the request's last step: new block ids, and entries that left a window."""
        request_id = item.request.request_id
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._free_rows.pop()
            self._filled[row] = 0
            self._num_dropped[row] = [0] * len(self._tables)
        start, end = self._filled[row], len(item.block_table.groups[0])
        for group, (table, blocks) in enumerate(zip(self._tables, item.block_table.groups, strict=True)):
            if end > start:
                table[row, start:end] = blocks[start:end]
            dropped, num_dropped = self._num_dropped[row][group], item.block_table.num_dropped[group]
            if num_dropped > dropped:
                table[row, dropped:num_dropped] = NULL_BLOCK
                self._num_dropped[row][group] = num_dropped
        self._filled[row] = end
        return row

    def _forget(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _token_ids(scheduled: tuple[ScheduledRequest, ...]) -> IntArray:
    token_ids: list[int] = []
    for item in scheduled:
        token_ids += item.request.token_ids[item.request.num_computed_tokens : item.end]
    return np.array(token_ids, dtype=np.int64)
