"""Adapter that computes latent attention with an attention backend for ordinary K and V.

A row of latents serves as the key of one head that all queries share; the row's first elements are the value.
"""

from collections.abc import Collection

import torch

from tandem.architecture.state import KVSpec, LatentSpec
from tandem.compute.attention import AttentionBackend, AttentionParams
from tandem.compute.layer_states import LayerLatents
from tandem.compute.step import AttentionBatch


class LatentsAsKV:
    """Implements `LatentBackend` with an `AttentionBackend`, `inner`."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph_safe = inner.graph_safe

    def refuses(self, spec: LatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer; None = it can."""
        reason = self._inner.refuses(KVSpec(1, spec.size, spec.dtype), block_size, softcap, sinks=sinks)
        return None if reason is None else f"{spec}, as K and V of one head: {reason}"

    def prepare(self, batch: AttentionBatch, kv: LayerLatents, layers: Collection[AttentionParams]) -> AttentionBatch:
        return self._inner.prepare(batch, kv.as_kv, layers)

    def attend(
        self, queries: torch.Tensor, latents: LayerLatents, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """See `LatentBackend.attend`."""
        return self._inner.attend(queries, latents.as_kv, batch, params)[..., : latents.rank]
