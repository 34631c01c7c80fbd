"""W8A8 products: rows are rounded to 8 bits too, as the checkpoint's scheme requires, and multiplied as integers.

Each row has its own scale, its largest magnitude / 127; numbers are rounded to the nearest, halves to even. Sums over
inputs are integers and exact, so a row's result does not depend on other rows: `y = (xq @ Wq.T) * sx * sw + bias`, as
vLLM's W8A8 computes it (compressed-tensors' own simulation has 127.5 for 127).
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch.nn import functional

from tandem.architecture.cost import Products
from tandem.compute.codes import CodeKind
from tandem.compute.order import Order
from tandem.compute.weights.coded import CodedWeight

_LARGEST: Final = 127
# Least rows that PyTorch multiplies as integers on CUDA; numbers of inputs and outputs are multiples of the other.
_LEAST_CUDA_ROWS: Final = 17
_CUDA_MULTIPLE: Final = 8
_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Int8Product(CodedWeight):
    """Implements `base.Weight` for int8 codes with one scale per output, or one for all."""

    is_packed: ClassVar[bool] = False
    products: ClassVar[Products | None] = Products.INT8_BY_INT8

    def __post_init__(self) -> None:
        coded = self.coded
        assert coded.kind is CodeKind.INT8
        assert coded.num_groups == 1
        assert coded.offsets is None
        assert coded.permutation is None
        assert coded.order is Order.ROWS

    @property
    def matrix(self) -> None:
        """None, since calls that fuse products do not round rows."""

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        codes, scales = quantised_rows(x)
        sums = _sums(codes, self.coded.codes)
        out = sums.float() * scales * (self.coded.scales.float().T * self.coded.factor)
        if bias is not None:
            out += bias
        return out.to(out_dtype or x.dtype)


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens, in] -> int8 of the same shape, and scales, float32 [num_tokens, 1]."""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_SCALE)
    return (wide / scales).round().clamp(-_LARGEST - 1, _LARGEST).to(torch.int8), scales


def _sums(codes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int8 [num_tokens, in] by int8 [out, in] -> int32 [num_tokens, out]."""
    num_tokens, num_outputs = len(codes), len(weights)
    if codes.is_cuda:
        codes, weights = padded_for_cuda(codes, weights)
    return torch._int_mm(codes, weights.T)[:num_tokens, :num_outputs]


def padded_for_cuda(codes: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads [num_tokens, in] and [out, in] with zeros to sizes that `torch._int_mm` takes on CUDA; a factor whose sizes
    fit is returned as it is.
    """
    more_inputs = -codes.shape[1] % _CUDA_MULTIPLE
    more_rows = max(0, _LEAST_CUDA_ROWS - len(codes))
    more_outputs = -len(weights) % _CUDA_MULTIPLE
    if more_inputs or more_rows:
        codes = functional.pad(codes, (0, more_inputs, 0, more_rows))
    if more_inputs or more_outputs:
        weights = functional.pad(weights, (0, more_inputs, 0, more_outputs))
    return codes, weights
