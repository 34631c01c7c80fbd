"""Cosine and sine tables of the rotary embeddings, one per distinct `RopeSpec`, shared by the layers that use it.

Inverse frequencies are those of `transformers.modeling_rope_utils`, in float32 and in the same order of operations, so
that angles are equal bit for bit.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tandem.architecture.rope import (
    DividedScaling,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeSpec,
    Unscaled,
    YarnScaling,
)
from tandem.core.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of a rotary embedding, times its attention factor. Row `p` is for position `p`."""

    cos: torch.Tensor  # [max_positions, rotary_dim / 2] float32
    sin: torch.Tensor  # [max_positions, rotary_dim / 2] float32


def build_rotary_tables(
    ropes: Iterable[RopeSpec | None], max_positions: int, device: torch.device
) -> dict[RopeSpec | None, RotaryTable]:
    """A table for each different embedding, with `max_positions` rows. Angles are float32 position times float32
    inverse frequency, as in transformers. The key None has a table of width 0.

    Raises:
        CorruptCheckpointError: an embedding's parameters give no finite angles.
    """
    return {rope: _build(rope, max_positions, device) for rope in set(ropes)}


def _build(rope: RopeSpec | None, max_positions: int, device: torch.device) -> RotaryTable:
    if rope is None:
        nothing = torch.empty(max_positions, 0, device=device)
        return RotaryTable(cos=nothing, sin=nothing)
    inv_freq = inverse_frequencies(rope).to(device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq)  # [max_positions, rotary_dim / 2]
    factor = rope.attention_factor
    return RotaryTable(cos=angles.cos().mul_(factor), sin=angles.sin_().mul_(factor))


def check_ropes(ropes: Iterable[RopeSpec | None]) -> None:
    """Raises `CorruptCheckpointError` if an angle or factor is not finite, before any table is built."""
    for rope in {rope for rope in ropes if rope is not None}:
        inverse_frequencies(rope)


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """[rotary_dim / 2] float32, radians per position.

    Raises:
        CorruptCheckpointError: they are not finite.
    """
    try:
        inv_freq = _SCALINGS[type(rope.scaling)](rope.scaling, rope)
        if not bool(inv_freq.isfinite().all()) or not math.isfinite(rope.attention_factor):
            raise ValueError("an angle or factor is not finite")
    except (ArithmeticError, ValueError) as error:
        raise CorruptCheckpointError(
            f"no rotary embedding can be computed from {rope} ({error}); correct the rope's values in config.json"
        ) from error
    return inv_freq


def _unscaled(scaling: Unscaled, rope: RopeSpec) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (rope.theta**exponents)


def _linear(scaling: LinearScaling, rope: RopeSpec) -> torch.Tensor:
    return _unscaled(Unscaled(), rope) / scaling.factor


def _proportional(scaling: ProportionalScaling, rope: RopeSpec) -> torch.Tensor:
    inv_freq = _unscaled(Unscaled(), rope)
    inv_freq[int(scaling.share * rope.rotary_dim // 2) :] = 0.0
    return inv_freq / scaling.factor


def _divided(scaling: DividedScaling, rope: RopeSpec) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (torch.tensor(scaling.factors, dtype=torch.float32) * rope.theta**exponents)


def _llama3(scaling: Llama3Scaling, rope: RopeSpec) -> torch.Tensor:
    inv_freq, original = _unscaled(Unscaled(), rope), scaling.original_length
    factor, low, high = scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(is_medium, blended, scaled)


def _yarn(scaling: YarnScaling, rope: RopeSpec) -> torch.Tensor:
    dim = rope.rotary_dim
    frequencies = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    kept, interpolated = 1.0 / frequencies, 1.0 / (scaling.factor * frequencies)
    low, high = _yarn_range(scaling, rope)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _yarn_range(scaling: YarnScaling, rope: RopeSpec) -> tuple[float, float]:
    """The dimensions between which frequencies go from kept to interpolated (`find_correction_range`)."""
    dim = rope.rotary_dim

    def dimension(rotations: float) -> float:
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


_SCALINGS: dict[type, Callable[[Any, RopeSpec], torch.Tensor]] = {
    Unscaled: _unscaled,
    LinearScaling: _linear,
    Llama3Scaling: _llama3,
    YarnScaling: _yarn,
    ProportionalScaling: _proportional,
    DividedScaling: _divided,
}
