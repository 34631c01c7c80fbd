"""Interface of token mixers (attention and recurrences), and the choice of one by the type of its spec."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from tandem.architecture.block_mixers import BlockAttentionSpec, CompressedAttentionSpec
from tandem.architecture.entry_mixers import EntryAttentionSpec, SharedRowAttentionSpec
from tandem.architecture.mixers import AttentionSpec, LatentAttentionSpec, MixerSpec
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec, SelectiveScanSpec, ShortConvSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.compute.ops import Kernels
from tandem.compute.step import Choices
from tandem.models.layers.attention import Attention
from tandem.models.layers.block_attention import BlockAttention
from tandem.models.layers.compressed_attention import CompressedAttention
from tandem.models.layers.entry_attention import EntryAttention
from tandem.models.layers.latent_attention import LatentAttention
from tandem.models.layers.recurrent import LinearRecurrence, ShortConv
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.selective_scan import SelectiveScan
from tandem.models.layers.shared_rows import SharedRowAttention
from tandem.models.layers.sparse_latent_attention import SparseLatentAttention
from tandem.models.parameters import Parameters

T = TypeVar("T")
Queries = torch.Tensor | tuple[torch.Tensor, ...]
"""One tensor [num_tokens, ...], or several."""


class Mixer(Protocol):
    """A token mixer of one layer. In each step `DecoderLayer` calls `write` for all tokens, then `attend` for those
    whose output is needed. `params`: parameters of the mixer that its backend needs.

    `state`: view of the layer's state (KV cache or recurrent state); `backend`: one that can read it. For a mixer with
    several states, these and `batch` are tuples with one item per state.
    """

    @property
    def params(self) -> Hashable: ...

    def write(self, x: torch.Tensor, positions: torch.Tensor, state: Any, batch: Any, backend: Any, /) -> Queries:
        """Writes the state of `x` [num_tokens, hidden] into `state`. Returns the first argument of `attend`: queries,
        or of a recurrent mixer the output before its projection.
        """
        ...

    def attend(self, queries: Any, state: Any, batch: Any, backend: Any, choices: Choices, /) -> torch.Tensor:
        """Output [num_tokens, hidden] for the queries, which read `state`. `choices`: tokens that indexers of earlier
        layers chose, by indexer; only sparse latent attention reads them and adds to them.
        """
        ...


def of_states(found: Mapping[int, T] | Sequence[T], states: Sequence[int]) -> T | tuple[T, ...]:
    """Selects the values of `states` for a mixer that reads them: the value of a single state, or a tuple."""
    return found[states[0]] if len(states) == 1 else tuple(found[state] for state in states)


def params_by_state(mixer: Mixer, states: Sequence[int]) -> Sequence[Hashable]:
    """Parameters that a mixer passes to the backend of each state."""
    if len(states) == 1:
        return (mixer.params,)
    assert isinstance(mixer.params, tuple)
    return mixer.params


def take_queries(queries: Queries, rows: torch.Tensor, kernels: Kernels) -> Queries:
    """The queries of the tokens `rows`, int64."""
    if isinstance(queries, torch.Tensor):
        return kernels.take_rows(queries.flatten(1), rows).view(-1, *queries.shape[1:])
    return tuple(kernels.take_rows(part.flatten(1), rows).view(-1, *part.shape[1:]) for part in queries)


def build_mixer(
    spec: MixerSpec, parameters: Parameters, tables: Mapping[RopeSpec | None, RotaryTable], kernels: Kernels
) -> Mixer:
    """The mixer that computes `spec`."""
    return _MIXERS[type(spec)](spec, parameters, tables[spec.rope], kernels)


_MIXERS: dict[type, Callable[[Any, Parameters, RotaryTable, Kernels], Mixer]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    SparseLatentAttentionSpec: SparseLatentAttention,
    BlockAttentionSpec: BlockAttention,
    CompressedAttentionSpec: CompressedAttention,
    SharedRowAttentionSpec: SharedRowAttention,
    EntryAttentionSpec: EntryAttention,
    ShortConvSpec: ShortConv,
    LinearRecurrenceSpec: LinearRecurrence,
    SelectiveScanSpec: SelectiveScan,
}
