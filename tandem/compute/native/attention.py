"""Attention backend with the compiled CPU kernel: reads K and V in place, for decodes and prefill chunks alike.

A query's result is bit-identical whatever else is computed in its step; see `tandem.compute.ops`.
"""

from collections.abc import Collection

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.native.bindings import NativeKernels, load
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

MAX_HEAD_DIM = 576


class NativeBackend:
    """Implements `AttentionBackend` on the CPU, for any head_dim that is a multiple of 8 up to 576, if the kernels can
    be compiled.
    """

    name = "native"
    graph_safe = False

    def __init__(self, device: torch.device) -> None:
        self._kernels: NativeKernels | None = None
        self._reason: str | None = None
        if device.type != "cpu":
            self._reason = f"it computes on the CPU, not on {device.type}"
            return
        try:
            self._kernels = load()
        except ConfigurationError as error:
            self._reason = str(error)

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer; None = it can."""
        if self._reason is not None:
            return self._reason
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim={spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        assert self._kernels is not None, self._reason
        return self._kernels.paged_attention(
            queries,
            kv.keys,
            kv.values,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            params.scale,
            window=params.window or 0,
            softcap=params.softcap,
            sinks=params.sinks,
        )
