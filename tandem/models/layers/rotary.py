"""Cosine and sine tables of the rotary embeddings, one per distinct `RopeConfig`, shared by the layers that use it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tandem.models.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Row `p` is for position `p`; already multiplied by the attention factor."""

    cos: torch.Tensor  # [max_positions, rotary_dim / 2] float32
    sin: torch.Tensor  # [max_positions, rotary_dim / 2] float32


def build_rotary_tables(
    ropes: Iterable[RopeConfig], max_positions: int, device: torch.device
) -> dict[RopeConfig, RotaryTable]:
    """Angles are float32 position times float32 inverse frequency, as in transformers."""
    return {rope: _build(rope, max_positions, device) for rope in set(ropes)}


def _build(rope: RopeConfig, max_positions: int, device: torch.device) -> RotaryTable:
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq)  # [max_positions, rotary_dim / 2]
    factor = rope.attention_factor
    return RotaryTable(cos=angles.cos().mul_(factor), sin=angles.sin_().mul_(factor))
