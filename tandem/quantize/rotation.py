"""Rotations of QuaRot (Ashkboos et al. 2024, arXiv:2404.00456) that can be merged into weights: R1 and R2. They spread
large numbers evenly, so that weights lose less by rounding.

R1 rotates the residual stream: maps that write to it are multiplied by an orthogonal matrix, maps that read it by the
inverse. Weights of norms are merged into the maps after them first. R2 rotates each head's values. No work is left at
run time, and the model computes the same except for rounding.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec, NormSpec
from tandem.core.errors import ConfigurationError
from tandem.quantize.hadamard import hadamard

_SEED = 20_240_456
_ALTERNATIVE = "leave --rotate out"


@dataclass(frozen=True, slots=True)
class MergedRotation:
    """Rotation of one model: `stream` [hidden, hidden], and `heads` by head size, [head_dim, head_dim]; all orthogonal,
    float64. A row x of the stream becomes `x @ stream`.

    A row of the stream becomes `x @ stream`.
    """

    stream: torch.Tensor
    heads: dict[int, torch.Tensor]

    @classmethod
    def of(cls, spec: ModelSpec) -> "MergedRotation":
        """Rotation by Hadamard matrices with random signs from a fixed seed.

        Raises:
            ConfigurationError: the model cannot be rotated; the message says why.
        """
        for index, layer in enumerate(spec.layers):
            reason = _refusal(layer)
            if reason is not None:
                raise ConfigurationError(f"--rotate: layer {index} of the model {reason}; {_ALTERNATIVE}")
        sizes = {layer.mixer.head_dim for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)}
        return cls(_signed(spec.hidden_size), {size: _signed(size) for size in sizes})

    def rotate_layer(self, layer: LayerSpec, tensors: MutableMapping[str, torch.Tensor]) -> None:
        """Rotates the layer's float32 tensors in `tensors`, in place."""
        mixer = layer.mixer
        assert isinstance(mixer, AttentionSpec), "others are refused"
        assert layer.before_mixer is not None
        assert layer.before_feed_forward is not None
        self._rotate_readers(layer.before_mixer, [mixer.q, *filter(None, (mixer.k, mixer.v))], tensors)
        readers, writers = _block_linears(layer.feed_forward)
        self._rotate_readers(layer.before_feed_forward, readers, tensors)
        for linear in (mixer.o, *writers):
            self._rotate_outputs(linear, self.stream, tensors)
        if mixer.v is not None:
            head = self.heads[mixer.head_dim]
            self._rotate_outputs(mixer.v, head, tensors)
            name = f"{mixer.o.name}.weight"
            tensors[name] = _times(tensors[name], head)

    def rotate_embedding(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotates rows of the embedding, [rows, hidden] float32."""
        return _times(rows, self.stream)

    def rotate_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """Undoes the rotation of a stream [..., hidden] float32."""
        return _times(hidden, self.stream.T)

    def rotate_head(self, rows: torch.Tensor, norm: NormSpec, weight: torch.Tensor | None) -> torch.Tensor:
        """Rotates rows of the output head, float32, with the final norm's weight merged in."""
        return _times(rows if weight is None else rows * (weight + float(norm.unit_offset)), self.stream)

    def _rotate_readers(
        self, norm: NormSpec, linears: list[LinearSpec], tensors: MutableMapping[str, torch.Tensor]
    ) -> None:
        factors = None if norm.tensor_name is None else tensors[norm.tensor_name] + float(norm.unit_offset)
        for linear in linears:
            name = f"{linear.name}.weight"
            weight = tensors[name] if factors is None else tensors[name] * factors
            tensors[name] = _times(weight, self.stream)
        if norm.tensor_name is not None:
            tensors[norm.tensor_name] = neutral(norm)

    def _rotate_outputs(
        self, linear: LinearSpec, matrix: torch.Tensor, tensors: MutableMapping[str, torch.Tensor]
    ) -> None:
        weight = f"{linear.name}.weight"
        tensors[weight] = _times(tensors[weight].T, matrix).T.contiguous()
        if linear.bias:
            bias = f"{linear.name}.bias"
            tensors[bias] = _times(tensors[bias].unsqueeze(0), matrix).squeeze(0)


def neutral(norm: NormSpec) -> torch.Tensor:
    """The norm weight that multiplies by one."""
    return torch.full((norm.size,), 1.0 - float(norm.unit_offset))


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiplies each piece of `size` elements in `rows` [n, k * size] float32 by `matrix` [size, size]."""
    pieces = rows.double().reshape(*rows.shape[:-1], -1, len(matrix))
    return torch.matmul(pieces, matrix).flatten(-2).float()


def _signed(size: int) -> torch.Tensor:
    found = hadamard(size)
    if found is None:
        raise ConfigurationError(f"--rotate: no Hadamard matrix of {size} rows is constructed here; {_ALTERNATIVE}")
    generator = torch.Generator().manual_seed(_SEED + size)
    return found * (torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1)


def _refusal(layer: LayerSpec) -> str | None:
    if layer.parallel_mixers:
        return "has several mixers side by side"
    if not isinstance(layer.mixer, AttentionSpec):
        return "does not attend over keys and values"
    if layer.before_mixer is None or layer.before_feed_forward is None:
        return "has no norm before one of its blocks"
    if layer.after_mixer is not None or layer.after_feed_forward is not None:
        return "norms what its blocks add to the residual stream"
    if layer.per_layer_embedding is not None or layer.mixer.reads_state_of is not None:
        return "has a per-layer embedding or reads another layer's K and V"
    if isinstance(layer.feed_forward, GatedSpec):
        return None
    if isinstance(layer.feed_forward, MixtureOfExpertsSpec) and _are_gated(layer.feed_forward):
        if layer.feed_forward.experts_in is not None:
            return "maps what its experts read"
        has_norm = layer.feed_forward.before_experts is not None or layer.feed_forward.router.norm is not None
        return "norms what its experts or router read" if has_norm else None
    return "has no feed-forward block, or one that is not gated, or several"


def _are_gated(spec: MixtureOfExpertsSpec) -> bool:
    return all(isinstance(expert, GatedSpec) for expert in (*spec.experts, *filter(None, (spec.shared,))))


def _block_linears(block: FeedForwardSpec | None) -> tuple[list[LinearSpec], list[LinearSpec]]:
    """Linear maps of a block that read the stream, and those that write to it."""
    if isinstance(block, GatedSpec):
        return [block.gate, block.up], [block.down]
    assert isinstance(block, MixtureOfExpertsSpec)
    blocks = (*block.experts, *filter(None, (block.shared,)))
    gated = [expert for expert in blocks if isinstance(expert, GatedSpec)]
    assert len(gated) == len(blocks), "others are refused"
    readers = [linear for expert in gated for linear in (expert.gate, expert.up)]
    others = [block.router.linear, *filter(None, (block.shared_gate,))]
    return [*readers, *others], [expert.down for expert in gated]
