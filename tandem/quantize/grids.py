"""Grids, the sets of numbers to which weights are rounded: one per format, with its tensors in the layout of
compressed-tensors 0.20.

A grid chooses scales, rounds weights divided by them, and writes and reads the tensors of a checkpoint. Scales are
rounded to their stored dtype before they are used, so that they are those that a reader finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

Tensors = Mapping[str, torch.Tensor]
"""Tensors of a weight, by what follows the name of its module and a dot."""

_SMALLEST: Final = 1e-12  # of an absolute maximum, so that a group of zeros has a scale
_E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MAX: Final = 6.0
_E4M3_MAX: Final = 448.0
_E8M0_BIAS: Final = 127


class Grid(Protocol):
    """Numbers of one format. `group_size`: consecutive inputs that share a scale; None = all inputs of an output."""

    @property
    def group_size(self) -> int | None: ...

    def fitted(self, weights: Sequence[torch.Tensor]) -> "Grid":
        """The grid for these weights [out, in], which readers fuse into one, with one tensor-wide scale if it has
        any.
        """
        ...

    def scales(self, absmax: torch.Tensor) -> torch.Tensor:
        """Scales for groups with these largest absolute values [out, groups], rounded as they are stored, float32."""
        ...

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds each number of `x`, float32, to the nearest one of the grid, for a scale of 1."""
        ...

    def stored(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Checkpoint tensors of the weight `numbers * scales`: numbers [out, in] of the grid, scales [out, groups]."""
        ...

    def read(self, tensors: Tensors, inputs: int) -> torch.Tensor:
        """Weight decoded from the tensors that `stored` made, float32 [out, in]."""
        ...

    def description(self) -> dict[str, object]:
        """The entry `weights` of a group in `quantization_config`."""
        ...

    @property
    def format_name(self) -> str:
        """Name of the format in compressed-tensors."""
        ...


def spread(scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Repeats scales [out, groups] for each input, to [out, in]."""
    return scales.repeat_interleave(inputs // scales.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class IntegerGrid:
    """Implements `Grid`: signed integers of 4 or 8 bits, without zero points ("pack-quantized").

    The scale is the absolute maximum divided by half of the range, 7.5 or 127.5, as in compressed-tensors.
    """

    bits: int
    group_size: int | None
    scale_dtype: torch.dtype
    format_name: str = "pack-quantized"

    def fitted(self, weights: Sequence[torch.Tensor]) -> "IntegerGrid":
        return self

    def scales(self, absmax: torch.Tensor) -> torch.Tensor:
        return _as_stored(absmax / (2**self.bits - 1) * 2, self.scale_dtype)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        half = 1 << (self.bits - 1)
        return x.round().clamp(-half, half - 1)

    def stored(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Packs 32 / bits codes in an int32, the first input's lowest. A code is the number plus half of the range."""
        per_word = 32 // self.bits
        shifts = torch.arange(per_word, dtype=torch.int64) * self.bits
        codes = (numbers.to(torch.int64) + (1 << (self.bits - 1))).view(len(numbers), -1, per_word)
        return {
            "weight_packed": (codes << shifts).sum(-1).to(torch.int32),
            "weight_scale": scales.to(self.scale_dtype),
            "weight_shape": torch.tensor(numbers.shape, dtype=torch.int64),
        }

    def read(self, tensors: Tensors, inputs: int) -> torch.Tensor:
        shifts = torch.arange(32 // self.bits, dtype=torch.int32) * self.bits
        codes = (tensors["weight_packed"].unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)
        return (codes.flatten(1).float() - (1 << (self.bits - 1))) * spread(tensors["weight_scale"].float(), inputs)

    def description(self) -> dict[str, object]:
        strategy = "channel" if self.group_size is None else "group"
        return _description(self.bits, "int", strategy, self.group_size)


@dataclass(frozen=True, slots=True)
class Fp8Grid:
    """Implements `Grid`: float8_e4m3fn with one scale per output ("float-quantized")."""

    scale_dtype: torch.dtype
    group_size: None = None
    format_name: str = "float-quantized"

    def fitted(self, weights: Sequence[torch.Tensor]) -> "Fp8Grid":
        return self

    def scales(self, absmax: torch.Tensor) -> torch.Tensor:
        return _as_stored(absmax / _E4M3_MAX, self.scale_dtype)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return _to_e4m3(x)

    def stored(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale": scales.to(self.scale_dtype)}

    def read(self, tensors: Tensors, inputs: int) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].float()

    def description(self) -> dict[str, object]:
        return _description(8, "float", "channel", None)


@dataclass(frozen=True, slots=True)
class Mxfp4Grid:
    """Implements `Grid`: E2M1 with a power of two as scale of each 32 inputs (OCP Microscaling Formats v1.0, 6.3).

    The scale is `2^(floor(log2(absmax)) - 2)`.
    """

    group_size: int = 32
    format_name: str = "mxfp4-pack-quantized"

    def fitted(self, weights: Sequence[torch.Tensor]) -> "Mxfp4Grid":
        return self

    def scales(self, absmax: torch.Tensor) -> torch.Tensor:
        exponents = absmax.clamp(min=_SMALLEST).log2().floor() - 2
        return exponents.clamp(-_E8M0_BIAS + 1, _E8M0_BIAS).exp2()

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return _to_e2m1(x)

    def stored(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        exponents = scales.log2().round() + _E8M0_BIAS
        return {"weight_packed": _pack_e2m1(numbers), "weight_scale": exponents.to(torch.uint8)}

    def read(self, tensors: Tensors, inputs: int) -> torch.Tensor:
        scales = (tensors["weight_scale"].float() - _E8M0_BIAS).exp2()
        return _unpack_e2m1(tensors["weight_packed"]) * spread(scales, inputs)

    def description(self) -> dict[str, object]:
        return _description(4, "float", "group", self.group_size) | {"scale_dtype": "torch.uint8"}


@dataclass(frozen=True, slots=True)
class Nvfp4Grid:
    """Implements `Grid`: E2M1 with an e4m3 scale for each 16 inputs, divided by a factor of the whole tensor.

    `global_scale`: that factor, `448 * 6 / absmax` of all weights that readers fuse, so that the largest scale is 448.
    """

    group_size: int = 16
    global_scale: float = 1.0
    format_name: str = "nvfp4-pack-quantized"

    def fitted(self, weights: Sequence[torch.Tensor]) -> "Nvfp4Grid":
        absmax = max(_SMALLEST, *(float(weight.abs().max()) for weight in weights))
        return replace(self, global_scale=float(torch.tensor(_E4M3_MAX * _E2M1_MAX / absmax)))

    def scales(self, absmax: torch.Tensor) -> torch.Tensor:
        """Scales; at least the smallest positive e4m3, never 0."""
        found = _to_e4m3(absmax / _E2M1_MAX * self.global_scale).clamp(min=2.0**-9)
        return found / self.global_scale

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return _to_e2m1(x)

    def stored(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": _pack_e2m1(numbers),
            "weight_scale": (scales * self.global_scale).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([self.global_scale]),
        }

    def read(self, tensors: Tensors, inputs: int) -> torch.Tensor:
        scales = tensors["weight_scale"].float() / tensors["weight_global_scale"]
        return _unpack_e2m1(tensors["weight_packed"]) * spread(scales, inputs)

    def description(self) -> dict[str, object]:
        return _description(4, "float", "tensor_group", self.group_size) | {"scale_dtype": "torch.float8_e4m3fn"}


def _description(bits: int, kind: str, strategy: str, group_size: int | None) -> dict[str, object]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }


def _as_stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales rounded to `dtype`, finite and positive, in float32."""
    limits = torch.finfo(dtype)
    least = limits.tiny * limits.eps  # NOTE: subnormal, as float16 has the scale of a row of numbers below 0.008
    return scales.clamp(max(_SMALLEST, least), limits.max).to(dtype).float()


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest E2M1 number, ties to the even mantissa; numbers beyond 6 become 6."""
    size = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).copysign(x)


def _pack_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2]; the code of the even input in the lower half of a byte."""
    codes = torch.searchsorted(_E2M1, numbers.abs().contiguous()) + 8 * numbers.signbit()
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def _unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    table = torch.cat((_E2M1, -_E2M1))
    return table[torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1).int()]
