"""Data of one step for kernels and attention backends: where each request's tokens and blocks are, which tokens need
results, and which are drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Choices = dict[str, torch.Tensor]
"""Tokens that a step's queries have chosen in the layers so far, [num_tokens, ...], by the name of the indexer that
chose them. A mixer whose choice others follow adds its own.
"""


class DraftedLayer(Protocol):
    """Inputs of a step's draft tokens in one layer whose state cannot be rewound to an earlier token (recurrences)."""

    def advance_past_accepted(self, backend: Any, batch: Any, rows: torch.Tensor) -> None:
        """Advances the layer's state past accepted drafts.

        Args:
            backend: backend of the layer's kind of state.
            batch: the accepted drafts, as prepared by the backend.
            rows: int64, indices of the accepted ones among all drafts of the step.
        """
        ...


class Drafted:
    """Draft tokens of a step, for layers whose state cannot be rewound. Such a layer writes the state before the
    drafts, and keeps here the inputs to advance it once it is known which drafts are accepted.

    Args:
        num_drafts: int64 [num_requests], number of drafts, which are the last tokens of each request of the batch.

    `layers`: filled in by a forward pass.
    """

    def __init__(self, num_drafts: npt.NDArray[np.int64]) -> None:
        self.num_drafts = num_drafts
        self.layers: list[DraftedLayer] = []


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests as one KV group sees them. Requests are concatenated along the token dimension.

    The K and V of all `seq_lens` tokens, this step's included, are in the KV cache when `attend` is called. Token `t`
    of request `r` is at position `seq_lens[r] - query_len[r] + t`. Entries of `block_tables` that lie wholly before a
    window, or past the sequence, are 0 and must not be read. If a block of the KV group has several pages, its id is
    the first page's, and `block_pages` has all of them.
    """

    query_start: torch.Tensor  # [num_requests + 1] int32, cumulative query lengths
    seq_lens: torch.Tensor  # [num_requests] int32
    block_tables: torch.Tensor  # [num_requests, max_blocks] int32, row stride may exceed max_blocks
    slot_mapping: torch.Tensor  # [num_tokens] int64 = block * block_size + offset; -1 = padding, not written
    max_query_len: int
    max_seq_len: int
    drafted: Drafted | None = field(default=None, kw_only=True)  # None = no drafts, or the state can be rewound
    # Pages of each block, by its id; None = a block is the page with its id.
    block_pages: Mapping[int, npt.NDArray[np.int32]] | None = field(default=None, kw_only=True)

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens of a step whose hidden states are needed: the last ones of some requests, or none.

    For other tokens the last layer that keeps state computes nothing but K and V, and the layers after it nothing at
    all, since no result depends on it.
    """

    rows: torch.Tensor  # [num_wanted] int64, ascending
    batches: Mapping[int, AttentionBatch]  # with these tokens alone; by KV group, or by state for a `Decoder`


class LayerTurns(Protocol):
    """Order in which processes with consecutive tokens of one step write each layer's state (context parallelism)."""

    def take(self) -> None:
        """Waits until the next layer's state of all earlier tokens is written.

        Raises:
            EngineStoppedError: a rank is lost or late.
        """
        ...

    def pass_on(self) -> None:
        """Reports that this layer's state is written.

        Raises:
            EngineStoppedError: a rank is lost or late.
        """
        ...


class HiddenStates:
    """Hidden states of all tokens of a step that a draft head or other reader outside the model needs. A forward pass
    fills them in.

    Args:
        layers: indices of the layers whose inputs (the residual stream before any norm) are read; the number of layers
            stands for the output of the final norm.

    `tensor` [num_tokens, len(layers) * hidden]: the states of a token concatenated, in the order of `layers`.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.tensor = torch.empty(0)

    def begin(self, residual: torch.Tensor) -> None:
        """Allocates memory for the tokens of `residual` [num_tokens, hidden], with its dtype."""
        num_tokens, hidden = residual.shape
        self.tensor = residual.new_empty(num_tokens, len(self.layers) * hidden)

    def columns(self, layer: int) -> torch.Tensor | None:
        """View of `tensor` for the states at that layer, [num_tokens, hidden]; None = they are not read."""
        if layer not in self.layers:
            return None
        hidden = self.tensor.shape[1] // len(self.layers)
        place = self.layers.index(layer) * hidden
        return self.tensor[:, place : place + hidden]

    def note(self, layer: int, residual: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """Stores `residual`, plus `x` if given, if the states of that layer are read."""
        columns = self.columns(layer)
        if columns is not None:
            columns.copy_(residual if x is None else residual + x)
