"""Compiled choice of tokens and attention to them on the CPU.

What a query chooses, and its result, are the same however its prompt is cut and whatever shares its step.
"""

from contextlib import suppress

import torch

from tandem.architecture.state import IndexedLatentSpec
from tandem.compute.arena import LayerIndexedLatents
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.index_choice import MAX_DIM, MULTIPLE, IndexChoice
from tandem.compute.sparse import ChosenRowsAsKV, IndexQueries, QueryBatch
from tandem.core.errors import ConfigurationError


class NativeIndexedBackend(ChosenRowsAsKV):
    """Implements `IndexedLatentBackend` for rows and index keys of a multiple of 8 numbers, up to 576 and 1,024, where
    the kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        self._choice: IndexChoice | None = None
        with suppress(ConfigurationError):  # NOTE: attention cannot be had either then, and `refuses` says why
            self._choice = IndexChoice() if device.type == "cpu" else None

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        if spec.index_dim % MULTIPLE or spec.index_dim > MAX_DIM:
            return f"index_dim={spec.index_dim} is not a multiple of {MULTIPLE} up to {MAX_DIM}"
        return super().refuses(spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """See `IndexedLatentBackend.choose`."""
        assert self._choice is not None, "refused"
        assert latents.index_keys is not None
        return self._choice.tokens(index, latents.index_keys, batch, top_k)
