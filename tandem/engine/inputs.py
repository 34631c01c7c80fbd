"""Builds the model's input tensors from a step's plan.

Keeps a copy of each running request's block tables in preallocated rows and appends only what is new. The rows have no
gaps, and a batch is in their order: its block tables are the rows themselves, so a step costs per token, not per token
of context. *Wanted* tokens are those of which logits are needed; layers after the last with state compute only these.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.compute.step import AttentionBatch, Drafted, WantedTokens
from tandem.engine.token_parts import TokenPart, tables_with_cuts
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import NewBlocks, ScheduledRequest, SchedulerOutput

IntArray = npt.NDArray[np.int64]
_LEAST_KNOWN = 64  # blocks with several pages, up to which none is forgotten


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of one step, requests concatenated along the token dimension; valid until the next step's are built.

    Args:
        batches: one for each KV group.
        wanted: the wanted tokens, with a batch for each KV group in which only these are read; None = all tokens.
        sample_rows: rows of the wanted tokens' hidden states whose logits choose tokens, in scheduled order: for each
            request that samples one row, and one more a draft.
        first_rows: the first row of each request among the wanted tokens' hidden states, in scheduled order.
        first_tokens: index of each request's first token among all tokens, in scheduled order.
        parts: inputs of the micro-batches, if the step is computed in such.
        goes_on: of a micro-batch, whether the next one has more tokens of its last request.
    """

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    batches: tuple[AttentionBatch, ...]
    sample_rows: torch.Tensor  # [num_sampling + num_drafts] int64
    first_rows: tuple[int, ...] = ()
    wanted: WantedTokens | None = None
    first_tokens: tuple[int, ...] = ()
    parts: "tuple[ModelInputs, ...]" = ()
    goes_on: bool = False

    @property
    def num_ended(self) -> int:
        """Number of its requests without one that continues in the next micro-batch."""
        return len(self.first_tokens) - self.goes_on


class InputBuilder:
    """Builds `ModelInputs` for consecutive steps.

    Args:
        layout: KV groups and block size.
        max_num_requests: requests that run at once.
        max_model_len: longest request in tokens.
        device: where the tensors go.
        wanted_groups: KV groups that only wanted tokens read (of `ModelSpec.wanted_states`).
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_num_requests: int,
        max_model_len: int,
        device: torch.device,
        wanted_groups: Collection[int],
    ) -> None:
        max_blocks = math.ceil(max_model_len / layout.block_size)
        self._block_size = layout.block_size
        self._device = device
        self._wanted_groups = wanted_groups
        self._can_rewind = [group.spec.can_rewind for group in layout.groups]
        self._is_constant = [group.spec.is_constant for group in layout.groups]
        self._tables = [np.zeros((max_num_requests, max_blocks), dtype=np.int32) for _ in layout.groups]
        self._pages = [
            None if group.pages_per_block == 1 else BlockPages(group.pages_per_block, table)
            for group, table in zip(layout.groups, self._tables, strict=True)
        ]
        self._rows: dict[str, int] = {}
        self._owners: list[str] = []  # of the rows, the other way round
        self._filled = [0] * max_num_requests
        self._num_dropped = [(0,) * len(layout.groups)] * max_num_requests

    def build(self, step: SchedulerOutput) -> ModelInputs:
        """The inputs of `step`, which schedules at least one token."""
        return self._build(step.scheduled, self.take(step), ())

    def take(self, step: SchedulerOutput) -> list[int]:
        """Update the block tables by a step. Returns the table row of each scheduled request."""
        for request_id in step.released:
            self._forget(request_id)
        return [self._update_row(item) for item in step.scheduled]

    def build_parts(self, parts: Sequence[TokenPart]) -> ModelInputs:
        """Build the inputs of one micro-batch (parts of requests) of a step that was given to `take`."""
        items = [part.item for part in parts]
        return self._build(items, [self._rows[item.request_id] for item in items], parts)

    def _build(
        self, items: Sequence[ScheduledRequest], rows_of_items: Sequence[int], parts: Sequence[TokenPart]
    ) -> ModelInputs:
        """Build the inputs of `items`. `parts`: the parts of requests that these are; () = all are whole."""
        goes_on = bool(parts) and parts[-1].item.end < parts[-1].whole.end
        rows = np.array(rows_of_items, dtype=np.int64)
        order = np.argsort(rows)
        scheduled = [items[index] for index in order.tolist()]
        parts = [parts[index] for index in order.tolist()] if parts else ()
        lengths = np.array([item.num_tokens for item in scheduled], dtype=np.int64)
        ends = np.array([item.end for item in scheduled], dtype=np.int64)
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(query_start[-1]) + (ends - query_start[1:])[owner]
        groups = range(len(self._tables))
        num_drafts = np.array([item.num_drafts for item in scheduled], dtype=np.int64)
        drafts = num_drafts if num_drafts.any() else None
        batches = self._attention_batches(groups, rows[order], positions, query_start, ends, drafts, parts)
        num_wanted = lengths if lengths.max() == 1 else np.array([_num_wanted(item) for item in scheduled])
        wanted = None
        if num_wanted.sum() < query_start[-1]:
            wanted = self._wanted(rows[order], positions, query_start, ends, num_wanted)
        wanted_start = np.concatenate(([0], np.cumsum(num_wanted)))
        first_rows, last_rows, first_tokens = np.empty_like(rows), np.empty_like(rows), np.empty_like(rows)
        first_rows[order], last_rows[order] = wanted_start[:-1], wanted_start[1:] - 1
        first_tokens[order] = query_start[:-1]
        sample_rows = [
            row
            for last, item in zip(last_rows.tolist(), items, strict=True)
            if item.samples
            for row in range(last - item.num_drafts, last + 1)
        ]
        return ModelInputs(
            input_ids=self._tensor(_token_ids(scheduled)),
            positions=self._tensor(positions),
            batches=tuple(batches.values()),
            sample_rows=self._tensor(np.array(sample_rows, dtype=np.int64)),
            first_rows=tuple(first_rows.tolist()),
            wanted=wanted,
            first_tokens=tuple(first_tokens.tolist()),
            goes_on=goes_on,
        )

    def _wanted(
        self, rows: IntArray, positions: IntArray, query_start: IntArray, ends: IntArray, num_wanted: IntArray
    ) -> WantedTokens:
        """The last `num_wanted` tokens of each request."""
        some = num_wanted > 0
        starts = np.concatenate(([0], np.cumsum(num_wanted[some])))
        first_tokens = query_start[1:][some] - num_wanted[some] - starts[:-1]
        tokens = np.arange(starts[-1]) + np.repeat(first_tokens, num_wanted[some])
        batches = self._attention_batches(self._wanted_groups, rows[some], positions[tokens], starts, ends[some])
        return WantedTokens(self._tensor(tokens), batches)

    def _attention_batches(
        self,
        groups: Collection[int],
        rows: IntArray,
        positions: IntArray,
        query_start: IntArray,
        ends: IntArray,
        num_drafts: IntArray | None = None,
        parts: Sequence[TokenPart] = (),
    ) -> dict[int, AttentionBatch]:
        max_seq_len = int(ends.max(initial=0))
        num_blocks = math.ceil(max_seq_len / self._block_size)
        starts = self._tensor(query_start.astype(np.int32))
        seq_lens = self._tensor(ends.astype(np.int32))
        lengths = np.diff(query_start)
        owner = np.repeat(np.arange(len(rows)), lengths)
        block_index, offset = np.divmod(positions, self._block_size)
        batches = {}
        has_no_gaps = not len(rows) or rows[-1] == len(rows) - 1
        for group in groups:
            table = self._tables[group]
            block_tables = table[: len(rows), :num_blocks] if has_no_gaps else table[rows, :num_blocks]
            if parts and self._is_constant[group]:
                last = np.array([(part.whole.end - 1) // self._block_size for part in parts])
                block_tables = tables_with_cuts(block_tables, table[rows, last], parts, self._block_size)
            slots = block_tables[owner, block_index].astype(np.int64) * self._block_size + offset
            pages = self._pages[group]
            batches[group] = AttentionBatch(
                query_start=starts,
                seq_lens=seq_lens,
                block_tables=self._tensor(block_tables),
                slot_mapping=self._tensor(slots),
                max_query_len=int(lengths.max(initial=0)),
                max_seq_len=max_seq_len,
                drafted=None if num_drafts is None or self._can_rewind[group] else Drafted(num_drafts),
                block_pages=None if pages is None else pages.by_id,
            )
        return batches

    def _update_row(self, item: ScheduledRequest) -> int:
        row = self._rows.get(item.request_id)
        if row is None:
            row = self._rows[item.request_id] = len(self._owners)
            self._owners.append(item.request_id)
            self._filled[row] = 0
            self._num_dropped[row] = (0,) * len(self._tables)
        if item.blocks is not None:
            self._update_tables(row, item.blocks)
        return row

    def _update_tables(self, row: int, blocks: NewBlocks) -> None:
        start, end = self._filled[row], self._filled[row] + len(blocks.added[0])
        for group, (table, added) in enumerate(zip(self._tables, blocks.added, strict=True)):
            table[row, start:end] = added
            table[row, self._num_dropped[row][group] : blocks.num_dropped[group]] = NULL_BLOCK
            if (pages := self._pages[group]) is not None:
                pages.add({block_id: blocks.pages[block_id] for block_id in added if block_id != NULL_BLOCK})
        self._filled[row], self._num_dropped[row] = end, blocks.num_dropped

    def _forget(self, request_id: str) -> None:
        """Free the request's row; the last row moves there."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        last, owner = len(self._owners) - 1, self._owners.pop()
        if row == last:
            return
        self._rows[owner], self._owners[row] = row, owner
        self._filled[row], self._num_dropped[row] = self._filled[last], self._num_dropped[last]
        for table in self._tables:
            table[row, : self._filled[row]] = table[last, : self._filled[row]]

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class BlockPages:
    """Pages of the blocks in a KV group's table, for groups whose blocks have several pages.

    Blocks that the table no longer has are forgotten now and then, when it has at most half of them.

    `by_id`: [num_pages] int32 of each block; the null block has no other page.
    """

    def __init__(self, num_pages: int, table: npt.NDArray[np.int32]) -> None:
        self._table = table
        self._limit = _LEAST_KNOWN
        self.by_id = {NULL_BLOCK: np.full(num_pages, NULL_BLOCK, dtype=np.int32)}

    def add(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """Add the pages of blocks that the table has got."""
        for block_id, pages in blocks.items():
            self.by_id[block_id] = np.array(pages, dtype=np.int32)
        if len(self.by_id) > self._limit:
            held = {NULL_BLOCK, *np.unique(self._table).tolist()}
            self.by_id = {block_id: pages for block_id, pages in self.by_id.items() if block_id in held}
            self._limit = max(_LEAST_KNOWN, 2 * len(self.by_id))


def _num_wanted(item: ScheduledRequest) -> int:
    """Number of its last tokens of which logits are needed."""
    return item.num_tokens if item.scores_prompt else int(item.samples) + item.num_drafts


def _token_ids(scheduled: Sequence[ScheduledRequest]) -> IntArray:
    token_ids: list[int] = []
    for item in scheduled:
        token_ids += item.token_ids
    return np.array(token_ids, dtype=np.int64)
