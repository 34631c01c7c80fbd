"""Formats whose products round rows to 8 bits (`--activations int8`), where the codes of a weight are integers.

Formats are asked for and not changed: others of the model, as floats, fp8 and NF4, take rows as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tandem.architecture.fields import Fields
from tandem.compute.codes import CodedMatrix
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, Weight, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedWeight
from tandem.compute.weights.formats import FormatReader
from tandem.compute.weights.rotations import RotatedWeight
from tandem.core.errors import ConfigurationError


def rounding_rows(reader: FormatReader) -> FormatReader:
    """The formats of `reader`, those of weight-only codes with rows that are rounded."""

    def read(fields: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
        return [_rounding(each) for each in reader(fields, kernels, stored)]

    return read


def check_rows_are_rounded(weights: Iterable[Weight]) -> None:
    """Raises `ConfigurationError` where no weight rounds rows."""
    matrices = (weight.inner.matrix if isinstance(weight, RotatedWeight) else weight.matrix for weight in weights)
    if not any(isinstance(matrix, CodedMatrix) and matrix.rounds_rows for matrix in matrices):
        raise ConfigurationError(
            "activations='int8' is for weights of integer codes (int8, int4, MXFP4, GGUF) whose scheme leaves "
            "activations as they are, and this model has none; leave it out, or make some with `tandem quantize`"
        )


def _rounding(weight_format: WeightFormat) -> WeightFormat:
    if isinstance(weight_format, CodedFormat) and weight_format.product is CodedWeight:
        return replace(weight_format, rounds_rows=True)
    return weight_format
