"""Interfaces of attention backends, which the decoder calls and which kernels implement.

A backend attends over the KV cache, where the step's K and V have already been written. It serves decodes, prefill
chunks and any mix of them in one call. `refuses` returns a reason for a spec that it cannot serve exactly. Data derived
from a batch are computed in `prepare`, once per step and KV group, not in each layer's `attend`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from tandem.architecture.state import KVSpec, LatentSpec, StateSpec
from tandem.compute.layer_states import LayerKV, LayerLatents, LayerState
from tandem.compute.step import AttentionBatch

Spec = TypeVar("Spec", bound=StateSpec, contravariant=True)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Options of one layer's attention.

    `sinks`: [num_heads] float32, a score for each head that joins the softmax and has no value; None = none.
    """

    num_heads: int  # of queries
    scale: float  # multiplies the products of queries and keys
    window: int | None = None  # positions that a query sees, its own included; None = all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 = they stay
    sinks: torch.Tensor | None = field(default=None, compare=False)


class StateBackend(Protocol[Spec]):
    """Methods that backends of every kind of state have (KV cache, latents, recurrent states and others).

    `graph_safe`: whether a step may be captured in a CUDA graph (no synchronisation, no host work that depends on
    data).
    """

    name: str
    graph_safe: bool

    def refuses(self, spec: Spec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why this backend cannot serve such a layer exactly here (device, dtype, shape); None = it can.

        `softcap`: of the scores, 0 = none. `sinks`: whether the layer has any.
        """
        ...

    def prepare(self, batch: AttentionBatch, kv: Any, layers: Collection[Any]) -> AttentionBatch:
        """Returns `batch`, of at least one request, with the data that the backend derives from it; `batch` itself if
        there are none. Valid until the batch changes or is dropped.

        Args:
            kv: state of any layer of the KV group: the others have the same shape, dtype and strides.
            layers: parameters of the layers that attend with this batch, without duplicates.
        """
        ...


class AttentionBackend(StateBackend[KVSpec], Protocol):
    """Attends over K and V. Stateless between steps: everything it needs is in its arguments."""

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype.

        `batch`: what `prepare` returned, with `params` among its layers.
        """
        ...


class LatentBackend(StateBackend[LatentSpec], Protocol):
    """Attends over latents (multi-head latent attention). Stateless between steps."""

    def attend(
        self, queries: torch.Tensor, latents: LayerLatents, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, rank + rotary_dim]`, already mapped into the space of
        rows; returns the sums of latents `[num_tokens, num_heads, rank]`, in the same dtype.
        """
        ...


Backends = Mapping[type[StateSpec], Any]
"""Kind of state -> what reads it: an `AttentionBackend` for `KVSpec`, a `LatentBackend` for `LatentSpec`, an
`IndexedLatentBackend` for `IndexedLatentSpec`, a `ChosenKVBackend` for `ChosenKVSpec`, a `RowsBackend` for `RowsSpec`,
an `EntriesBackend` for `EntriesSpec`, a `RecurrentBackend` for `RecurrentSpec`. `EntryInputsSpec` has one that
only prepares.
"""


def prepare_by_state(
    backends: Sequence[StateBackend[Any]],
    batches: Mapping[int, AttentionBatch],
    kv: Sequence[LayerState],
    layers: Sequence[Collection[Any]],
) -> dict[int, AttentionBatch]:
    """Calls `prepare` of each state's backend, once for all states of a KV group, which share a batch.

    All arguments are by index of state. `layers`: parameters of the layers that read the state. A batch without
    requests is returned unchanged.
    """
    groups: dict[int, list[int]] = {}
    for state, batch in batches.items():
        groups.setdefault(id(batch), []).append(state)
    prepared: dict[int, AttentionBatch] = {}
    for states in groups.values():
        batch = batches[states[0]]
        if batch.num_requests:
            readers = {params for state in states for params in layers[state]}
            batch = backends[states[0]].prepare(batch, kv[states[0]], readers)
        prepared.update(dict.fromkeys(states, batch))
    return prepared
