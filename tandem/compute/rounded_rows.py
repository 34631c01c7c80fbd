"""Definition of rounding activations to 8 bits before a product with integer codes (`--activations int8`).

Each segment of a row has its own scale, its largest magnitude / 127; numbers are rounded to the nearest, halves to
even. So an outlier reduces precision only in its segment, and a row's result does not depend on other rows.
"""

from typing import Final

import torch
from torch.nn import functional

_LARGEST: Final = 127.0
_LEAST: Final = 2.0**-100  # a segment without anything as large is rounded to zeros


def round_rows(x: torch.Tensor, segment_size: int) -> torch.Tensor:
    """Floats [num_tokens, in] -> the rounded values, integers times the scale of each `segment_size` inputs, float32
    [num_tokens, in]. A segment with a NaN is NaN, one with infinities is not finite.
    """
    num_tokens, inputs = x.shape
    padding = -inputs % segment_size
    segments = functional.pad(x.float(), (0, padding)).view(num_tokens, -1, segment_size)
    largest = segments.abs().amax(-1, keepdim=True)
    is_zero = largest < _LEAST
    inverse = torch.where(
        is_zero, 0.0, torch.full_like(largest, _LARGEST) / largest
    )  # NOTE: a scalar / is a reciprocal
    rounded = (segments * inverse).round() * torch.where(is_zero, 0.0, largest / _LARGEST)
    return rounded.view(num_tokens, -1)[:, :inputs]
