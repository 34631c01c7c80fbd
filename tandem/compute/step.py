"""One step's requests as kernels and attention read them: where their tokens are, and which of them are asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
    the results would not show it.
    """

    rows: torch.Tensor  # [num_wanted] int64, ascending
    batches: Mapping[int, AttentionBatch]  # their requests with these tokens alone; of each KV group or state read
