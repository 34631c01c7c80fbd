"""Weight formats of checkpoints converted from GGUF files, which keep GGUF's quantised blocks."""

from collections.abc import Sequence

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Choice, StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat
from tandem.compute.weights.gguf_blocks import TYPES, GgufBlocks
from tandem.compute.weights.parts import source_of


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format for each type of blocks, whose tensors it lists.

    Raises:
        UnsupportedCheckpointError: a type that is not supported.
    """
    found = quantisation.section("tensors")
    formats = []
    for type_name in found.unread() if found is not None else ():
        if type_name not in TYPES:
            assert found is not None
            raise found.unsupported(type_name, ", ".join(TYPES))
        names = frozenset(found.texts(type_name) or ()) if found is not None else frozenset()
        coding = GgufBlocks(type_name, stored)
        formats.append(CodedFormat(coding, _within(names), kernels, has_tables=True))
    return formats


def _within(names: frozenset[str]) -> Choice:
    def choose(weight: TensorSpec) -> str | None:
        return None if source_of(weight).tensor in names else "the file does not have it in this type"

    return choose
