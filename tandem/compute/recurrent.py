"""Interface of backends for recurrent layers, and the batch that says where each request's state is read and written.

A request's state is in the pages of the block of its last computed token. A step reads it there and writes the state
after each of its blocks that has pages: those kept for later requests, and the last one. For a request with draft
tokens it writes the state before the drafts; `advance_past_accepted` then computes the state after the accepted ones,
from inputs that the layers kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tandem.architecture.state import RecurrentSpec
from tandem.compute.attention import Backends, StateBackend
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.step import AttentionBatch
from tandem.kvcache.prefix import NULL_BLOCK

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecurrentBatch(AttentionBatch):
    """A batch with the states that it reads and writes.
    `first_write`: index of each request's first item in the lists of writes. A request's writes are in order; the last
    is the state after its last token, which goes to the null block if that token is a draft. `tap_rows` and
    `column_rows` are indices of rows of `with_columns`. `draft_rows`: indices of the step's tokens that are drafts.
    """

    read_pages: torch.Tensor  # [num_requests, pages_per_block] int64
    is_first: torch.Tensor  # [num_requests] bool: there is no state to read, the request begins
    first_write: torch.Tensor  # [num_requests + 1] int64
    write_pages: torch.Tensor  # [num_writes, pages_per_block] int64
    write_ends: torch.Tensor  # [num_writes] int64, the token of the step before which the state is
    tap_rows: torch.Tensor  # [num_tokens, taps] int64, oldest first
    column_rows: torch.Tensor  # [num_writes, taps - 1] int64
    draft_rows: torch.Tensor  # [num_drafts] int64

    def with_columns(self, x: torch.Tensor, state: LayerRecurrent) -> torch.Tensor:
        """The convolution inputs that requests had before the step (zeros at their beginning), then `x` [num_tokens,
        channels].
        """
        before = state.read_columns(self.read_pages).masked_fill_(self.is_first[:, None, None], 0.0)
        return torch.cat((before.flatten(0, 1), x))

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: LayerRecurrent,
        *,
        has_activation: bool,
    ) -> torch.Tensor:
        """Causal convolution of `x` [num_tokens, channels] with `weight` [taps, channels] float32, and SiLU if
        `has_activation`, in float32; writes the next convolution inputs into `state`. Returns the shape and dtype of
        `x`.

        Computed element by element in a fixed order of taps, so that no bit depends on how a prompt is divided.
        """
        rows = self.with_columns(x, state)
        out = rows[self.tap_rows[:, 0]].float().mul_(weight[0])
        for tap in range(1, weight.shape[0]):
            out.add_(rows[self.tap_rows[:, tap]].float().mul_(weight[tap]))
        self.keep_columns(rows, state)
        if bias is not None:
            out.add_(bias)
        return (functional.silu(out) if has_activation else out).to(x.dtype)

    def keep_columns(self, rows: torch.Tensor, state: LayerRecurrent) -> None:
        """Writes the convolution inputs after the step into `state`. `rows`: returned by `with_columns`."""
        if self.column_rows.shape[1]:
            state.write_columns(self.write_pages, rows[self.column_rows])

    def note_drafts(
        self,
        state: LayerRecurrent,
        x: torch.Tensor,
        recurrence: tuple["RecurrenceInputs", "RecurrenceParams"] | None = None,
    ) -> None:
        """Keeps the inputs from which a layer's state can be advanced past drafts. `x` [num_tokens, channels]: the
        convolution's input.
        """
        if self.drafted is not None:
            if recurrence is not None:
                recurrence = recurrence[0].take(self.draft_rows), recurrence[1]
            self.drafted.layers.append(_RecurrentDrafts(state, x[self.draft_rows], recurrence))


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """Inputs of the recurrence for a step's tokens, see `LinearRecurrenceSpec`. A head's state is a matrix [rows,
    columns]. `a` decides how much of it is kept, `b` how much of a token is added to it.
    """

    q: torch.Tensor  # [num_tokens, num_groups, columns]
    k: torch.Tensor  # [num_tokens, num_groups, columns]
    v: torch.Tensor  # [num_tokens, num_heads, rows]
    a: torch.Tensor  # [num_tokens, num_heads] or [num_tokens, num_heads, columns]
    b: torch.Tensor | None  # [num_tokens, num_heads]; None = no delta rule (Mamba-2), and `a` decides that too

    def take(self, rows: torch.Tensor) -> "RecurrenceInputs":
        """The inputs of the tokens `rows`, int64."""
        b = None if self.b is None else self.b[rows]
        return RecurrenceInputs(self.q[rows], self.k[rows], self.v[rows], self.a[rows], b)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceParams:
    """A layer's constants, float32; see `LinearRecurrenceSpec`."""

    a_log: torch.Tensor  # [num_heads], or [num_heads, columns] where only rates are of each column, and no steps
    a_bias: torch.Tensor  # of the shape of one token's `a`


class RecurrentBackend(StateBackend[RecurrentSpec], Protocol):
    """Advances recurrent states. Stateless between steps. `prepare` returns a `RecurrentBatch`."""

    def recur(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, state: LayerRecurrent, batch: RecurrentBatch
    ) -> torch.Tensor:
        """Outputs y, [num_tokens, num_heads, rows] float32; writes the new states into `state`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _RecurrentDrafts:
    """A `DraftedLayer`. `x` [num_drafts, channels]; `recurrence` None = the layer only has a convolution."""

    state: LayerRecurrent
    x: torch.Tensor
    recurrence: tuple[RecurrenceInputs, RecurrenceParams] | None

    def advance_past_accepted(self, backend: RecurrentBackend, batch: RecurrentBatch, rows: torch.Tensor) -> None:
        batch.keep_columns(batch.with_columns(self.x[rows], self.state), self.state)
        if self.recurrence is not None:
            inputs, params = self.recurrence
            backend.recur(inputs.take(rows), params, self.state, batch)


def advance_past_accepted(batch: AttentionBatch, num_accepted: Sequence[int], backends: Backends, state: Any) -> None:
    """Advances the states of a KV group past the draft tokens of a step that were accepted.

    Args:
        batch: the step's batch of the KV group.
        num_accepted: number of accepted drafts of each request.
        backends: by kind of state.
        state: state of any layer of the KV group.
    """
    drafted = batch.drafted
    if drafted is None or not any(num_accepted):
        return
    counts, device = np.asarray(num_accepted, dtype=np.int64), batch.block_tables.device
    going_on = np.flatnonzero(counts)
    first_drafts, counts = (np.cumsum(drafted.num_drafts) - drafted.num_drafts)[going_on], counts[going_on]
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = np.arange(starts[-1]) + np.repeat(first_drafts - starts[:-1], counts)
    before = batch.seq_lens.cpu().numpy()[going_on] - drafted.num_drafts[going_on]
    requests = torch.from_numpy(going_on).to(device)
    accepted = replace(
        batch,
        query_start=torch.from_numpy(starts.astype(np.int32)).to(device),
        seq_lens=torch.from_numpy((before + counts).astype(np.int32)).to(device),
        block_tables=batch.block_tables[requests],
        slot_mapping=torch.full((len(rows),), -1, device=device),
        max_query_len=int(counts.max()),
        max_seq_len=int((before + counts).max()),
        drafted=None,
    )
    backend: StateBackend[RecurrentSpec] = backends[RecurrentSpec]
    prepared, own = backend.prepare(accepted, state, ()), torch.from_numpy(rows).to(device)
    for layer in drafted.layers:
        layer.advance_past_accepted(backend, prepared, own)


def prepare_recurrent(batch: AttentionBatch, state: LayerRecurrent) -> RecurrentBatch:
    """Finds the pages from which each request's state is read and to which it is written. `state`: of any layer of the
    KV group.
    """
    device, block_size, num_columns = batch.block_tables.device, state.block_size, state.columns.shape[1]
    tables = batch.block_tables.cpu().numpy()
    begins = batch.query_start.cpu().numpy().astype(np.int64)
    ends = batch.seq_lens.cpu().numpy().astype(np.int64)
    lengths = np.diff(begins)
    starts, requests = ends - lengths, np.arange(len(ends))
    num_drafts = np.zeros_like(ends) if batch.drafted is None else batch.drafted.num_drafts
    kept = ends - num_drafts
    read_blocks = tables[requests, np.maximum(starts - 1, 0) // block_size]
    first_block, counts = starts // block_size, (kept - 1) // block_size - starts // block_size + 1
    owner = np.repeat(requests, counts)
    blocks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first_block[owner]
    write_blocks = tables[owner, blocks]
    is_written = write_blocks != NULL_BLOCK
    owner, blocks, write_blocks = owner[is_written], blocks[is_written], write_blocks[is_written]
    write_ends = np.minimum((blocks + 1) * block_size, kept[owner]) - starts[owner] + begins[owner]
    drafting = np.flatnonzero(num_drafts)
    if len(drafting):
        order = np.argsort(np.concatenate((owner, drafting)), kind="stable")
        owner = np.concatenate((owner, drafting))[order]
        write_blocks = np.concatenate((write_blocks, np.full(len(drafting), NULL_BLOCK, dtype=tables.dtype)))[order]
        write_ends = np.concatenate((write_ends, begins[drafting + 1]))[order]
    token_owner = np.repeat(requests, lengths)
    tokens = np.arange(begins[-1])
    draft_rows = tokens[tokens >= (begins[1:] - num_drafts)[token_owner]]

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
        drafted=batch.drafted,
        read_pages=tensor(_pages(batch, read_blocks, state.num_pages)),
        is_first=tensor(starts == 0),
        first_write=tensor(np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(ends)))))),
        write_pages=tensor(_pages(batch, write_blocks, state.num_pages)),
        write_ends=tensor(write_ends),
        tap_rows=tensor(rows(token_owner, tokens, num_columns + 1)),
        column_rows=tensor(rows(owner, write_ends - 1, num_columns)),
        draft_rows=tensor(draft_rows),
    )


def _pages(batch: AttentionBatch, block_ids: npt.NDArray[Any], num_pages: int) -> IntArray:
    """The pages of each block, [num_blocks, num_pages]."""
    if batch.block_pages is None:
        assert num_pages == 1, f"of blocks of {num_pages} pages only one is known"
        return block_ids.astype(np.int64)[:, None]
    found = np.empty((len(block_ids), num_pages), dtype=np.int64)
    for row, block_id in enumerate(block_ids.tolist()):
        found[row] = batch.block_pages[block_id]
    return found
