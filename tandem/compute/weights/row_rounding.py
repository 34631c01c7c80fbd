"""Rounding of activations to 8 bits in products with weights whose codes are integers: `--activations int8`, and W8A8
for layers that multiply with a weight's numbers themselves.

Weights in formats that do not support it, such as floats, fp8 and NF4, multiply unrounded rows as before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from tandem.architecture.fields import Fields
from tandem.compute.codes import CodedMatrix
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, Weight, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedWeight
from tandem.compute.weights.formats import FormatReader
from tandem.compute.weights.int8_activations import Int8Product, quantised_rows
from tandem.compute.weights.rotations import RotatedWeight
from tandem.core.errors import ConfigurationError


def rounding_rows(reader: FormatReader) -> FormatReader:
    """A reader of the same formats as `reader`, in which those with weight-only quantisation round rows."""

    def read(fields: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
        return [_rounding(each) for each in reader(fields, kernels, stored)]

    return read


def check_rows_are_rounded(weights: Iterable[Weight]) -> None:
    """Raises `ConfigurationError` if none of the weights rounds rows."""
    matrices = (weight.inner.matrix if isinstance(weight, RotatedWeight) else weight.matrix for weight in weights)
    if not any(isinstance(matrix, CodedMatrix) and matrix.rounds_rows for matrix in matrices):
        raise ConfigurationError(
            "activations='int8' is for weights of integer codes (int8, int4, MXFP4, GGUF) whose scheme leaves "
            "activations as they are, and this model has none; leave it out, or make some with `tandem quantize`"
        )


def rows_as_multiplied(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    """The rows `x` [num_tokens, in] as `weight` multiplies them, for a layer that multiplies with its numbers itself:
    rounded to 8 bits where the checkpoint's scheme is W8A8.
    """
    if not isinstance(weight, Int8Product):
        return x
    codes, scales = quantised_rows(x)
    return (codes.float() * scales).to(x.dtype)


def _rounding(weight_format: WeightFormat) -> WeightFormat:
    if isinstance(weight_format, CodedFormat) and weight_format.product is CodedWeight:
        return replace(weight_format, rounds_rows=True)
    return weight_format
