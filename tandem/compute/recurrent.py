"""The seam between the model and what carries recurrent states forward.

A request's state stands in the page of the block of its last computed token. A step reads it there and writes the state
after each of its blocks that has a page: those kept for later requests, and the last one.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.architecture.state import RecurrentSpec
from tandem.compute.arena import LayerRecurrent
from tandem.compute.attention import StateBackend
from tandem.compute.step import AttentionBatch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecurrentBatch(AttentionBatch):
    """A batch with the states that it reads and writes.

    `first_write`: of each request in the lists of what is written; a request's are in order, its last one is that of
    its last token. `tap_rows` and `column_rows` are rows of `with_columns`.
    """

    read_pages: torch.Tensor  # [num_requests] int64
    is_first: torch.Tensor  # [num_requests] bool: there is no state to read, the request begins
    first_write: torch.Tensor  # [num_requests + 1] int64
    write_pages: torch.Tensor  # [num_writes] int64
    write_ends: torch.Tensor  # [num_writes] int64, the token of the step before which the state is
    tap_rows: torch.Tensor  # [num_tokens, taps] int64, oldest first
    column_rows: torch.Tensor  # [num_writes, taps - 1] int64

    def with_columns(self, x: torch.Tensor, state: LayerRecurrent) -> torch.Tensor:
        """The columns that requests had before the step, then `x` [num_tokens, channels]."""
        before = state.columns[self.read_pages].masked_fill_(self.is_first[:, None, None], 0.0)
        return torch.cat((before.flatten(0, 1), x))

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LayerRecurrent
    ) -> torch.Tensor:
        """The causal convolution of `x` [num_tokens, channels] by `weight` [taps, channels] float32, in float32; the
        columns that follow are in `state` then.

        Element by element in one order of taps, so that no bit depends on how a prompt is cut.
        """
        rows = self.with_columns(x, state)
        out = rows[self.tap_rows[:, 0]].float().mul_(weight[0])
        for tap in range(1, weight.shape[0]):
            out.add_(rows[self.tap_rows[:, tap]].float().mul_(weight[tap]))
        if self.column_rows.shape[1]:
            state.columns[self.write_pages] = rows[self.column_rows]
        return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """Inputs of the recurrence, of a step's tokens. `a` is of each head, or of each of its columns."""

    q: torch.Tensor  # [num_tokens, num_groups, columns]
    k: torch.Tensor  # [num_tokens, num_groups, columns]
    v: torch.Tensor  # [num_tokens, num_heads, rows]
    a: torch.Tensor  # [num_tokens, num_heads] or [num_tokens, num_heads, columns]
    b: torch.Tensor | None  # [num_tokens, num_heads]; None = a token's step is its beta, and there is no delta


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceParams:
    """A layer's constants, float32; see `LinearRecurrenceSpec`."""

    a_log: torch.Tensor  # [num_heads]
    a_bias: torch.Tensor  # of the shape of one token's `a`


class RecurrentBackend(StateBackend[RecurrentSpec], Protocol):
    """Carries recurrent states forward. Stateless between steps. `prepare` returns a `RecurrentBatch`."""

    def recur(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, state: LayerRecurrent, batch: RecurrentBatch
    ) -> torch.Tensor:
        """Outputs y, [num_tokens, num_heads, rows] float32; writes the new states into `state`."""
        ...


def prepare_recurrent(batch: AttentionBatch, state: LayerRecurrent) -> RecurrentBatch:
    """The pages that each request's state is read from and written to. `state`: of any layer of the KV group."""
    device, block_size, num_columns = batch.block_tables.device, state.block_size, state.columns.shape[1]
    tables = batch.block_tables.cpu().numpy()
    begins = batch.query_start.cpu().numpy().astype(np.int64)
    ends = batch.seq_lens.cpu().numpy().astype(np.int64)
    lengths = np.diff(begins)
    starts, requests = ends - lengths, np.arange(len(ends))
    read_pages = tables[requests, np.maximum(starts - 1, 0) // block_size].astype(np.int64)
    first_block, counts = starts // block_size, (ends - 1) // block_size - starts // block_size + 1
    owner = np.repeat(requests, counts)
    blocks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first_block[owner]
    pages = tables[owner, blocks].astype(np.int64)
    is_written = pages != 0
    owner, blocks, pages = owner[is_written], blocks[is_written], pages[is_written]
    write_ends = np.minimum((blocks + 1) * block_size, ends[owner]) - starts[owner] + begins[owner]
    token_owner = np.repeat(requests, lengths)
    tokens = np.arange(begins[-1])

    def rows(of: IntArray, last: IntArray, width: int) -> IntArray:
        """Rows of `with_columns` that hold the `width` tokens up to the step's token `last` of requests `of`."""
        local = last[:, None] - begins[of][:, None] - (width - 1) + np.arange(width)
        in_step = local + begins[of][:, None] + len(ends) * num_columns
        before = of[:, None] * num_columns + local + num_columns
        return np.where(local >= 0, in_step, before).astype(np.int64)

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return RecurrentBatch(
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.slot_mapping,
        batch.max_query_len,
        batch.max_seq_len,
        read_pages=tensor(read_pages),
        is_first=tensor(starts == 0),
        first_write=tensor(np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(ends)))))),
        write_pages=tensor(pages),
        write_ends=tensor(write_ends),
        tap_rows=tensor(rows(token_owner, tokens, num_columns + 1)),
        column_rows=tensor(rows(owner, write_ends - 1, num_columns)),
    )
