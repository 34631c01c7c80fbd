"""MXFP4 checkpoints like gpt-oss: all experts of a layer in one tensor of blocks (OCP Microscaling Formats 1.0)."""

from collections.abc import Sequence

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat
from tandem.compute.weights.four_bit_floats import ExpertBlocks
from tandem.compute.weights.modules import except_for, where_stored
from tandem.compute.weights.parts import source_of

_MARKERS = ("blocks", "scales")


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format, for the experts."""
    outside = except_for(quantisation.texts("modules_to_not_convert") or ())

    def excluded(weight: TensorSpec) -> str | None:
        is_stacked = source_of(weight).index is not None
        return outside(weight) if is_stacked else "it is no expert in a tensor of all"

    return (CodedFormat(ExpertBlocks(stored), where_stored(_MARKERS, stored, excluded), kernels),)
