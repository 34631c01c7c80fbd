"""The seam between the model and its attention kernels.

A backend attends over the arena, where the step's K and V have already been written. It serves decodes, prefill chunks
and any mix of them in one call, and answers `refuses` with a reason instead of serving a spec wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tandem.architecture.state import KVSpec
from tandem.attention.arena import LayerKV


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests as one KV group sees them. Requests are concatenated along the token dimension.

    The K and V of all `seq_lens` tokens, this step's included, are in the arena when `attend` is called. Token `t` of
    request `r` is at position `seq_lens[r] - query_len[r] + t`. Entries of `block_tables` that lie wholly before a
    window, or past the sequence, are 0 and must not be read.
    """

    query_start: torch.Tensor  # [num_requests + 1] int32, cumulative query lengths
    seq_lens: torch.Tensor  # [num_requests] int32
    block_tables: torch.Tensor  # [num_requests, max_blocks] int32, row stride may exceed max_blocks
    slot_mapping: torch.Tensor  # [num_tokens] int64 = block * block_size + offset; -1 = padding, not written
    max_query_len: int
    max_seq_len: int

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens of a step whose hidden states are asked for: the last ones of some requests, or none.

    The last layer that keeps state computes nothing but K and V of the others, and the layers behind it nothing at all:
    nobody could tell from the results.
    """

    rows: torch.Tensor  # [num_wanted] int64, ascending
    batches: Mapping[int, AttentionBatch]  # their requests with these tokens alone; of each KV group or state read


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """One layer's attention beyond the batch. `window` as in KVSpec; `softcap` 0 = none.

    `sinks`: [num_heads] float32, a score for each head that joins the softmax and has no value; None = none.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = field(default=None, compare=False)


class AttentionBackend(Protocol):
    """Stateless between steps: everything it needs is in its arguments.

    `graph_safe`: whether `attend` may be captured in a CUDA graph (no synchronisation, no host work that depends on
    data).
    """

    name: str
    graph_safe: bool

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Why this backend cannot serve such a layer exactly here (device, dtype, shape), or None when it can."""
        ...

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype."""
        ...
