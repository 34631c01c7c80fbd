"""Reads the weight formats that a checkpoint's configuration declares, and chooses one for each weight."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from tandem.architecture.cost import Products
from tandem.architecture.fields import Fields
from tandem.architecture.quantisation import find_quantisation, reader_of
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat
from tandem.compute.weights.dense import DenseFormat
from tandem.compute.weights.int8_activations import Int8Product
from tandem.core.errors import UnsupportedCheckpointError

_DECODED: Mapping[CodeKind, Products] = {
    CodeKind.TABLE4: Products.FOUR_BITS,
    CodeKind.INT8: Products.INT8,
    CodeKind.E4M3: Products.FP8,
}

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


def products_with(weight: TensorSpec, weight_format: WeightFormat) -> Products:
    """The kind of products with a weight of that format, for reports."""
    if not isinstance(weight_format, CodedFormat):
        return Products.FLOATS
    if weight_format.product is Int8Product:
        return Products.INT8_BY_INT8
    return _DECODED[weight_format.coding.layout(weight).kind]
