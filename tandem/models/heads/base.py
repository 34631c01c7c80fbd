"""Interface of heads, whatever their layout, and their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.state import StateSpec
from tandem.compute.attention import Backends
from tandem.compute.layer_states import LayerState
from tandem.compute.step import AttentionBatch


class Head(Protocol):
    """A head of one layer. Row-wise, but for attention.

    `layers_read`: the model's layers whose inputs it takes, as in `HiddenStates`. `state`: what its layer keeps.
    """

    @property
    def layers_read(self) -> tuple[int, ...]: ...

    @property
    def state(self) -> StateSpec: ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The model's states, [n, len(layers_read) * its hidden size] -> [n, hidden], as `forward` takes them."""
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
        """Hidden states behind the head's layers, [n, hidden]: for `logits`, and as `hidden` for the next guess. Writes
        the rows' state into `kv`.

        Args:
            token_ids: int64 [n], the token behind each row's position.
            positions: int64 [n], of the rows among those that the head has seen of a request.
            hidden: [n, hidden]; may be overwritten.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> float32 [n, vocab] of the model's tokens; -inf for those that the head does not have.

        Valid until the next call.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head in memory.

    weight_bytes: of its own parameters.
    max_positions: rows of a request that it takes.
    fingerprint: of its weights and of the model that it reads; where equal, heads compute the same state.
    """

    head: Head
    weight_bytes: int
    max_positions: int
    fingerprint: str
