"""The table of formats: which of them a checkpoint has, and which of these each of its weights."""

from collections.abc import Callable, Sequence

from tandem.architecture.fields import Fields
from tandem.architecture.registry import refuse_formats
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import WeightFormat
from tandem.compute.weights.dense import DenseFormat
from tandem.core.errors import UnsupportedCheckpointError

FormatReader = Callable[[Fields, Kernels], Sequence[WeightFormat]]
"""From a `config.json` to the formats that its weights may have; a weight has the first that does not refuse it."""


def read_formats(fields: Fields, kernels: Kernels) -> Sequence[WeightFormat]:
    """The formats of a published checkpoint, see `FormatReader`.

    Raises:
        UnsupportedCheckpointError: weights are quantised in a form that is not read.
    """
    refuse_formats(fields)
    return (DenseFormat(kernels),)


def choose_format(weight: TensorSpec, formats: Sequence[WeightFormat]) -> WeightFormat:
    """The first of `formats` that does not refuse the weight.

    Raises:
        UnsupportedCheckpointError: all refuse it; the message has their reasons.
    """
    reasons = []
    for weight_format in formats:
        reason = weight_format.refusal(weight)
        if reason is None:
            return weight_format
        reasons.append(f"{weight_format.name}: {reason}")
    raise UnsupportedCheckpointError(f"no format that is served has {weight.name} ({'; '.join(reasons)})")
