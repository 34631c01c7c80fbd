"""fp8 checkpoints: `weight` float8_e4m3fn with scales per block, per output or for the whole tensor (DeepSeek-V3, 3.3).

The shape of a module's scales decides which it has. Scales multiply, though most files call them `weight_scale_inv`.
Activations are not quantised: fixed scales for them are ignored.

If experts are `fp4` (DeepSeek-V4), their `weight` has two 4-bit numbers in a byte, and a scale for each 32 inputs.
"""

from collections.abc import Sequence

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Choice, StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat
from tandem.compute.weights.four_bit_floats import FourBitFloats
from tandem.compute.weights.modules import checked_group, except_for, where_stored
from tandem.compute.weights.parts import tensor_name
from tandem.compute.weights.plain_codes import CHANNELS, TENSOR, Blocks, PlainCodes

_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
_BLOCK = 128  # rows and columns of a block, if the configuration does not say
_BYTES = ("int8", "uint8")  # dtypes of two 4-bit codes
_EXPERTS = ".experts."


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: a format for each name and each granularity of scales."""
    quantisation.only("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    quantisation.only("expert_dtype", ("fp8", "fp4"), "fp8, fp4")
    quantisation.only("scale_fmt", ("float", "ue8m0"), "float, ue8m0")
    excluded = except_for(quantisation.texts("modules_to_not_convert") or quantisation.texts("ignored_layers") or ())
    blocks = _read_blocks(quantisation)
    present = where_stored(_SUFFIXES, stored, excluded)
    formats: list[WeightFormat] = []
    for suffix in _SUFFIXES if quantisation.text("expert_dtype") == "fp4" else ():
        experts = FourBitFloats("weight", suffix, stored, code_dtypes=_BYTES)
        formats.append(CodedFormat(experts, _where_bytes_are(experts, present), kernels))
    for suffix in _SUFFIXES:
        for granularity in (blocks, TENSOR, CHANNELS):
            coding = PlainCodes(CodeKind.E4M3, granularity, suffix, stored)
            formats.append(CodedFormat(coding, _where_it_fits(coding, present), kernels))
    fallback = PlainCodes(CodeKind.E4M3, blocks, _SUFFIXES[0], stored)  # by which what is missing has a name
    return (*formats, CodedFormat(fallback, present, kernels))


def _read_blocks(quantisation: Fields) -> Blocks:
    sizes = quantisation.get("weight_block_size")
    if sizes is None:
        is_whole = quantisation.has("weight_block_size") or quantisation.text("activation_scheme") == "static"
        return TENSOR if is_whole else Blocks(_BLOCK, _BLOCK)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise quantisation.wrong("weight_block_size", "two positive integers")
    return Blocks(sizes[0], checked_group(quantisation, "weight_block_size", sizes[1]))


def _where_bytes_are(coding: FourBitFloats, present: Choice) -> Choice:
    """Chooses weights stored as bytes with scales of that name; before a checkpoint is opened, those of experts."""

    def choose(weight: TensorSpec) -> str | None:
        reason = present(weight)
        if reason is not None:
            return reason
        if coding.stored is None:
            return None if _EXPERTS in weight.name else "it is no expert"
        found = coding.stored.get(tensor_name(weight, "weight"))
        if found is None or str(found.dtype).removeprefix("torch.") not in _BYTES:
            return "it has no codes of 4 bits"
        name = tensor_name(weight, coding.scale)
        return None if name in coding.stored else f"{name} is not stored"

    return choose


def _where_it_fits(coding: PlainCodes, present: Choice) -> Choice:
    """Chooses weights whose scales have the shape that belongs to the coding."""

    def choose(weight: TensorSpec) -> str | None:
        reason = present(weight)
        if reason is not None or coding.stored is None:
            return reason
        name = tensor_name(weight, coding.scale)
        found = coding.stored.get(name)
        if found is None:
            return f"{name} is not stored"
        return None if coding.fits(weight, found.shape) else f"{name} has shape {list(found.shape)}"

    return choose
