"""Rows of a drafting head for one request: the computed ones, and hidden states of the served model that wait.

A row is a position's hidden states together with the token after it. `HeadDrafter` has one `HeadRows` a request.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.core.hashing import extend_hashes
from tandem.engine.logits import SamplingState
from tandem.kvcache.block_table import BlockTable
from tandem.scheduler.step_deltas import TableChanges


@dataclass(slots=True)
class HeadRows:
    """State of one request in a head drafter.

    Args:
        token_ids: prompt and output.
        first: position of its first row; None = no states of it are known.
        num_computed: rows whose state is in the pool.
        waiting: the model's states of the rows behind those, [n, width] each, `num_waiting` in all.
        hash_root: parent hash of its first block of rows.
        block_hashes: of its blocks of rows that begin at the request's first position.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    state: SamplingState
    hash_root: bytes
    first: int | None = None
    num_computed: int = 0
    waiting: list[torch.Tensor] = field(default_factory=list)
    num_waiting: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    table: BlockTable | None = None
    changes: TableChanges = field(default_factory=TableChanges)

    @property
    def num_ready(self) -> int:
        """Number of waiting rows whose next token is known, so that they can be computed."""
        if self.first is None:
            return 0
        return min(self.num_waiting, len(self.token_ids) - 1 - self.first - self.num_computed)

    def follows(self, position: int) -> bool:
        """Whether states from `position` on continue the known rows, or replace waiting ones."""
        return self.first is not None and 0 <= position - self.first - self.num_computed <= self.num_waiting

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to date: the token of a row is the one after its position."""
        if (len(self.token_ids) - 1) // block_size > len(self.block_hashes):
            extend_hashes(self.hash_root, self.block_hashes, self.token_ids[1:], block_size)

    def split(self, num_rows: int) -> torch.Tensor:
        """Take the first `num_rows` of the waiting rows, at least one."""
        rows = joined(self.waiting)
        self.waiting = [rows[num_rows:]] if num_rows < len(rows) else []
        self.num_waiting -= num_rows
        return rows[:num_rows]

    def add(self, rows: torch.Tensor) -> None:
        """Append `rows` to those that wait."""
        self.waiting.append(rows)
        self.num_waiting += len(rows)

    def keep(self, num_rows: int) -> None:
        """Drop all waiting rows but the first `num_rows`."""
        while self.num_waiting > num_rows:
            last = self.waiting.pop()
            self.num_waiting -= len(last)
            if self.num_waiting < num_rows:
                self.add(last[: num_rows - self.num_waiting])

    def forget(self) -> None:
        """Forget all rows."""
        self.first, self.num_computed, self.num_waiting = None, 0, 0
        self.waiting.clear()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts in one tensor, [n, width].

    NOTE: copied part by part, since a concatenation of many rows wakes PyTorch's own threads. These then spin and take
    the cores from the model's next step.
    """
    if len(parts) == 1:
        return parts[0]
    rows = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    start = 0
    for part in parts:
        rows[start : start + len(part)].copy_(part)
        start += len(part)
    return rows


def root_of_rows(hash_root: bytes, first: Sequence[int]) -> bytes:
    """Parent hash of a request's first block of rows, whose tokens begin with the request's second one. `first`: the
    request's first token, or nothing if there is none.
    """
    told = b"".join(token_id.to_bytes(8, "little") for token_id in first)
    return hashlib.sha256(b"rows of a head\0" + hash_root + told).digest()
