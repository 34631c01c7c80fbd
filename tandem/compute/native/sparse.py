"""Compiled choice of tokens and entries, and attention to them on the CPU.

What a query chooses, and its result, are the same however its prompt is cut and whatever shares its step.
"""

import torch

from tandem.architecture.entry_states import EntriesSpec
from tandem.architecture.state import IndexedLatentSpec
from tandem.compute.layer_states import LayerEntries, LayerIndexedLatents
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.index_choice import MAX_DIM, MULTIPLE, IndexChoice
from tandem.compute.sparse import ChosenRowsAsKV, IndexQueries, QueryBatch
from tandem.compute.torch.entries import EntriesAsKV
from tandem.core.errors import ConfigurationError


class NativeIndexedBackend(ChosenRowsAsKV):
    """Implements `IndexedLatentBackend` for rows and index keys of a multiple of 8 numbers, up to 576 and 1,024, where
    the kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        self._choice = _load_choice(device)

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        return _refusal(spec.index_dim) or super().refuses(spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """See `IndexedLatentBackend.choose`."""
        assert self._choice is not None, "refused"
        assert latents.index_keys is not None
        return self._choice(index, latents.index_keys, batch, top_k, block_size=latents.index_keys.shape[1])


class NativeEntriesBackend(EntriesAsKV):
    """Implements `EntriesBackend` for entries and index keys of a multiple of 8 numbers, up to 576 and 1,024, where the
    kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        self._choice = _load_choice(device)

    def refuses(self, spec: EntriesSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        return _refusal(spec.index_dim) or super().refuses(spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, entries: LayerEntries, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """See `EntriesBackend.choose`."""
        assert self._choice is not None, "refused"
        assert entries.index_keys is not None
        size, span = entries.block_size, entries.span
        return self._choice(index, entries.index_keys, batch, top_k, block_size=size, span=span)


def _load_choice(device: torch.device) -> IndexChoice | None:
    """None where attention cannot be had either, and refuses with the reason."""
    try:
        return IndexChoice() if device.type == "cpu" else None
    except ConfigurationError:
        return None


def _refusal(index_dim: int) -> str | None:
    if index_dim % MULTIPLE or index_dim > MAX_DIM:
        return f"index_dim={index_dim} is not a multiple of {MULTIPLE} up to {MAX_DIM}"
    return None
