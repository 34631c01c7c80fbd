"""Interface of draft heads of any layout, and a head with its sizes as loaded into memory. The engine's drafter calls
`fuse` once for hidden states of the model, then for each guess `forward` and `logits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.state import StateSpec
from tandem.compute.attention import Backends
from tandem.compute.layer_states import LayerState
from tandem.compute.step import AttentionBatch


class Head(Protocol):
    """A draft head of one layer. Except for attention, each row (a position of a request) is computed separately.
    `layers_read`: the model's layers whose inputs the head takes; the number of layers stands for the output of the
    final norm. `state`: KV that the head's layer keeps.
    """

    @property
    def layers_read(self) -> tuple[int, ...]: ...

    @property
    def state(self) -> StateSpec: ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The model's hidden states, [n, len(layers_read) * its hidden size] -> [n, hidden], the input of `forward`."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        kv: Sequence[LayerState],
        batch: AttentionBatch,
        backends: Backends,
    ) -> torch.Tensor:
        """Hidden states after the head's layer, [n, hidden], for `logits` and as `hidden` for the next guess. Writes
        the rows' KV into `kv`.

        Args:
            token_ids: int64 [n], the token after each row's position.
            positions: int64 [n], each row's index among the rows of its request that the head has computed.
            hidden: [n, hidden]; may be overwritten.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> float32 [n, vocab] of the model's tokens; -inf for tokens that the head does not have.

        Valid until the next call.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A draft head in memory.

    weight_bytes: bytes of its own parameters. max_positions: the most rows of a request that it can compute.
    fingerprint: identifies its weights and the model that it reads; heads with equal ones compute the same KV.
    """

    head: Head
    weight_bytes: int
    max_positions: int
    fingerprint: str
