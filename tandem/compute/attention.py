"""The seam between the model and its attention kernels.

A backend attends over the arena, where the step's K and V have already been written. It serves decodes, prefill chunks
and any mix of them in one call, and answers `refuses` with a reason instead of serving a spec wrongly.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from tandem.architecture.state import KVSpec, StateSpec
from tandem.compute.arena import LayerKV
from tandem.compute.step import AttentionBatch

Spec = TypeVar("Spec", bound=StateSpec, contravariant=True)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """One layer's attention beyond the batch. `window` as in KVSpec; `softcap` 0 = none.

    `sinks`: [num_heads] float32, a score for each head that joins the softmax and has no value; None = none.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = field(default=None, compare=False)


class StateBackend(Protocol[Spec]):
    """What every backend answers, whatever kind of state it reads.

    `graph_safe`: whether a step may be captured in a CUDA graph (no synchronisation, no host work that depends on
    data).
    """

    name: str
    graph_safe: bool

    def refuses(self, spec: Spec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Why this backend cannot serve such a layer exactly here (device, dtype, shape), or None when it can."""
        ...


class AttentionBackend(StateBackend[KVSpec], Protocol):
    """Reads K and V. Stateless between steps: everything it needs is in its arguments."""

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype."""
        ...
