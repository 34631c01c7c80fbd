"""NVIDIA ModelOpt checkpoints: FP8 with one scale per tensor, and NVFP4, whose number per tensor multiplies scales."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat, Coding
from tandem.compute.weights.four_bit_floats import NV_BLOCK, FourBitFloats
from tandem.compute.weights.modules import names_of, where_stored
from tandem.compute.weights.plain_codes import TENSOR, PlainCodes

_CODINGS: Mapping[str, Callable[[StoredTensors | None], Coding]] = {
    "FP8": lambda stored: PlainCodes(CodeKind.E4M3, TENSOR, "weight_scale", stored),
    "NVFP4": lambda stored: FourBitFloats("weight", "weight_scale", stored, "weight_scale_2"),
}
"""By `quant_algo`."""


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format, for all modules with stored scales. Settings for the KV cache have no
    effect: it has the model's dtype.
    """
    algorithm = quantisation.text("quant_algo") or ""
    if algorithm not in _CODINGS:
        raise quantisation.unsupported("quant_algo", ", ".join(sorted(_CODINGS)))
    if algorithm == "NVFP4":
        quantisation.only("group_size", (NV_BLOCK,), str(NV_BLOCK))
    patterns = quantisation.texts("exclude_modules") or quantisation.texts("ignore") or ()

    def excluded(weight: TensorSpec) -> str | None:
        is_one = any(fnmatchcase(name, pattern) for name in names_of(weight) for pattern in patterns)
        return "exclude_modules has it" if is_one else None

    choice = where_stored(("weight_scale",), stored, excluded)
    return (CodedFormat(_CODINGS[algorithm](stored), choice, kernels),)
