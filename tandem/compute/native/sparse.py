"""Sparse attention on the CPU: adds the compiled choice (top-k selection by index keys) to the attention of its bases.

`NativeIndexedBackend` chooses tokens, whose latents its base attends to (DeepSeek-V3.2). `NativeEntriesBackend` chooses
entries, rows that each stand for several tokens (DeepSeek-V4). Both attend with the compiled `NativeBackend`. A query's
choice and result do not depend on how its prompt is divided or what shares its step.
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
    """Implements `IndexedLatentBackend` for rows and index keys whose sizes are multiples of 8, up to 576 and 1,024, if
    the kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        self._choice = _load_choice(device)

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer (its sizes, the device, missing kernels); None = it can."""
        return _refusal(spec.index_dim) or super().refuses(spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Positions of the best tokens, see `IndexedLatentBackend.choose`."""
        assert self._choice is not None, "refused"
        assert latents.index_keys is not None
        return self._choice(index, latents.index_keys, batch, top_k, block_size=latents.index_keys.shape[1])


class NativeEntriesBackend(EntriesAsKV):
    """Implements `EntriesBackend` for entries and index keys whose sizes are multiples of 8, up to 576 and 1,024, if
    the kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        self._choice = _load_choice(device)

    def refuses(self, spec: EntriesSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why it cannot serve such a layer (its sizes, the device, missing kernels); None = it can."""
        return _refusal(spec.index_dim) or super().refuses(spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, entries: LayerEntries, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Indices of the best entries, see `EntriesBackend.choose`."""
        assert self._choice is not None, "refused"
        assert entries.index_keys is not None
        size, span = entries.block_size, entries.span
        return self._choice(index, entries.index_keys, batch, top_k, block_size=size, span=span)


def _load_choice(device: torch.device) -> IndexChoice | None:
    """The compiled choice; None = it is not available. Then attention is not either, and `refuses` says why."""
    try:
        return IndexChoice() if device.type == "cpu" else None
    except ConfigurationError:
        return None


def _refusal(index_dim: int) -> str | None:
    if index_dim % MULTIPLE or index_dim > MAX_DIM:
        return f"index_dim={index_dim} is not a multiple of {MULTIPLE} up to {MAX_DIM}"
    return None
