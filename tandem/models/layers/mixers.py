"""Token mixers by the type of their spec."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch

from tandem.architecture.mixers import AttentionSpec, LatentAttentionSpec, MixerSpec
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec, ShortConvSpec
from tandem.architecture.rope import RopeSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.attention import Attention
from tandem.models.layers.latent_attention import LatentAttention
from tandem.models.layers.recurrent import LinearRecurrence, ShortConv
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class Mixer(Protocol):
    """A token mixer. `params`: what it asks of a backend. `state` is the view of what such a layer keeps, `backend`
    one that reads it.
    """

    @property
    def params(self) -> Hashable: ...

    def write(self, x: torch.Tensor, positions: torch.Tensor, state: Any, batch: Any, backend: Any, /) -> torch.Tensor:
        """What `attend` takes of `x` [num_tokens, hidden], [num_tokens, ...]: queries, or where a state is carried
        forward what it gives; what the layer keeps of `x` is in `state` then.
        """
        ...

    def attend(self, queries: torch.Tensor, state: Any, batch: Any, backend: Any, /) -> torch.Tensor:
        """[num_tokens, hidden], of what the queries find in `state`."""
        ...


def build_mixer(
    spec: MixerSpec, parameters: Parameters, tables: Mapping[RopeSpec | None, RotaryTable], kernels: Kernels
) -> Mixer:
    """The mixer that computes `spec`."""
    return _MIXERS[type(spec)](spec, parameters, tables[spec.rope], kernels)


_MIXERS: dict[type, Callable[[Any, Parameters, RotaryTable, Kernels], Mixer]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    ShortConvSpec: ShortConv,
    LinearRecurrenceSpec: LinearRecurrence,
}
