"""Reads the weight formats that a checkpoint's configuration declares, and chooses one for each weight."""

from collections.abc import Callable, Sequence
from importlib import import_module

from tandem.architecture.fields import Fields
from tandem.architecture.quantisation import find_quantisation, reader_of
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.dense import DenseFormat
from tandem.core.errors import UnsupportedCheckpointError

FormatReader = Callable[[Fields, Kernels, StoredTensors | None], Sequence[WeightFormat]]
"""From a `config.json` to the formats that its weights may have; a weight has the first that does not refuse it.

The tensors that the checkpoint stores are None as long as it is not opened: then formats are as the configuration alone
says, to count bytes.
"""


def read_formats(fields: Fields, kernels: Kernels, stored: StoredTensors | None = None) -> Sequence[WeightFormat]:
    """The formats of a published checkpoint, see `FormatReader`.

    Raises:
        UnsupportedCheckpointError: the quantisation method is not supported.
        CorruptCheckpointError: its description is impossible, or contradicts the tensors.
    """
    quantisation = find_quantisation(fields)
    coded: Sequence[WeightFormat] = ()
    if quantisation is not None:
        module = import_module(f"tandem.compute.weights.{reader_of(quantisation)}")
        coded = module.read(quantisation, kernels, stored)
    return (*coded, DenseFormat(kernels))


def choose_format(weight: TensorSpec, formats: Sequence[WeightFormat]) -> WeightFormat:
    """The first of `formats` that accepts the weight.

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
