"""compressed-tensors checkpoints: reads their configuration, in which groups of modules have a scheme for weights and
activations.

After compressed_tensors 0.20 (quantization/quant_config.py, quant_args.py, transform/transform_args.py). Activations
are not quantised, except if weights and activations are both 8-bit integers (see `int8_activations`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem.architecture.fields import REQUIRED, Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Choice, StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedWeight, Coding
from tandem.compute.weights.four_bit_floats import MX_BLOCK, NV_BLOCK, FourBitFloats
from tandem.compute.weights.int8_activations import Int8Product
from tandem.compute.weights.modules import (
    NamedModules,
    checked_group,
    closest_group,
    named_modules,
    read_entries,
    where_stored,
)
from tandem.compute.weights.packed_integers import PackedIntegers
from tandem.compute.weights.parts import source_of
from tandem.compute.weights.plain_codes import CHANNELS, TENSOR, Blocks, PlainCodes
from tandem.compute.weights.rotations import Rotations, read_rotations
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError

_PACKED = ("weight_packed", "weight_scale")

_log = logging.getLogger(__name__)


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format for each of its groups of modules."""
    rotations = read_rotations(quantisation, stored)
    sparsity = quantisation.section("sparsity_config")
    if sparsity is not None:
        sparsity.only("format", ("dense",), "dense")
    if quantisation.section("kv_cache_scheme") is not None:
        _log.warning("%s: kv_cache_scheme is not followed: the cache has the dtype of the model", quantisation.where)
    groups = quantisation.section("config_groups")
    if groups is None:
        raise quantisation.wrong("config_groups", "an object of groups")
    ignored = named_modules(quantisation, "ignore", stored)
    sections = {name: group for name in groups.unread() if (group := groups.section(name)) is not None}
    group_of = closest_group({name: read_entries(group, "targets") for name, group in sections.items()}, stored)
    formats = [
        _read_group(group, quantisation, _members(group_of, name), ignored, rotations, kernels, stored)
        for name, group in sections.items()
    ]
    return [*formats[:-1], *(replace(last, choice=_guarded(last.choice, rotations)) for last in formats[-1:])]


def _members(group_of: Callable[[TensorSpec], str | None], name: str) -> NamedModules:
    """A function that tells whether a weight's module belongs to the group `name`."""
    return lambda weight: group_of(weight) == name


def _guarded(choice: Choice, rotations: Rotations) -> Choice:
    """`choice` of the last group, with an error for weights that are rotated but not quantised."""

    def choose(weight: TensorSpec) -> str | None:
        reason = choice(weight)
        if reason is not None and rotations.has(weight):
            raise UnsupportedCheckpointError(
                f"transform_config rotates {weight.name}, which is not coded ({reason}); rotations of coded weights "
                "are served"
            )
        return reason

    return choose


def _read_group(
    group: Fields,
    quantisation: Fields,
    targets: NamedModules,
    ignored: NamedModules,
    rotations: Rotations,
    kernels: Kernels,
    stored: StoredTensors | None,
) -> CodedFormat:
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise group.unsupported("weights", "schemes that code weights")
    if group.section("output_activations") is not None:
        raise group.unsupported("output_activations", "null")
    where, key = (group, "format") if group.text("format") else (quantisation, "format")
    layout = where.text(key) or ""
    if layout not in _CODINGS:
        raise where.unsupported(key, ", ".join(sorted(_CODINGS)))
    coding, markers = _CODINGS[layout](weights, stored)
    product: type[CodedWeight] = CodedWeight
    if isinstance(coding, PlainCodes) and coding.kind is CodeKind.INT8 and inputs is not None:
        _check_integer_activations(inputs, weights)
        product = Int8Product
    choice = _choice(targets, ignored, markers, stored)
    return CodedFormat(coding, choice, kernels, product, rotations)


def _choice(
    targets: NamedModules,
    ignored: NamedModules,
    markers: Sequence[str],
    stored: StoredTensors | None,
) -> Choice:
    """Chooses weights by the configuration, which tensors must not contradict; heads and routers by their tensors."""

    def excluded(weight: TensorSpec) -> str | None:
        if ignored(weight):
            return "ignore has it"
        return None if targets(weight) else "no target of the group"

    present = where_stored(markers, stored)

    def choose(weight: TensorSpec) -> str | None:
        reason, absent = excluded(weight), present(weight)
        found = None if stored is None else stored.get(source_of(weight).tensor)
        is_plain = found is not None and weight.source is None and not weight.is_small
        if reason is None and absent is not None and is_plain:
            raise CorruptCheckpointError(
                f"quantization_config has a scheme for {weight.name}, whose scales are not stored; "
                "add it to `ignore`, or download config.json again"
            )
        return reason or absent

    return choose


def _packed_integers(weights: Fields, stored: StoredTensors | None) -> tuple[Coding, tuple[str, ...]]:
    weights.only("type", ("int",), "int")
    weights.only("actorder", ("weight", "static", "group", "dynamic", False, True), "weight, group")
    has_order = weights.get("actorder") in ("group", "dynamic", True)
    bits = weights.count("num_bits", 8, low=2, high=8)
    strategy = weights.text("strategy", "group" if weights.get("group_size") else "channel")
    weights.only("strategy", ("group", "channel"), "group, channel")
    group_size = _group_size(weights) if strategy == "group" else None
    return PackedIntegers(bits, group_size, weights.flag("symmetric", True), stored, has_order), (
        "weight_packed",
        "weight_scale",
    )


def _plain(weights: Fields, stored: StoredTensors | None) -> tuple[Coding, tuple[str, ...]]:
    weights.only("num_bits", (8,), "8")
    weights.only("type", ("int", "float"), "int, float")
    kind = CodeKind.INT8 if weights.text("type", "int") == "int" else CodeKind.E4M3
    has_zeros = not weights.flag("symmetric", True)
    if has_zeros and kind is CodeKind.E4M3:
        raise weights.unsupported("symmetric", "true")
    blocks = _blocks(weights)
    if has_zeros and blocks.is_one:
        raise weights.unsupported("symmetric", "true, with one scale for a tensor")
    return PlainCodes(kind, blocks, "weight_scale", stored, has_zeros), ("weight_scale",)


def _blocks(weights: Fields) -> Blocks:
    strategy = weights.text("strategy", "tensor")
    if strategy == "block":
        shape = weights.get("block_structure")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise weights.wrong("block_structure", "two positive integers")
        return Blocks(shape[0], checked_group(weights, "block_structure", shape[1]))
    weights.only("strategy", ("tensor", "channel", "group"), "tensor, channel, group, block")
    if strategy == "group":
        return Blocks(1, _group_size(weights))
    return TENSOR if strategy == "tensor" else CHANNELS


def _mxfp8(weights: Fields, stored: StoredTensors | None) -> tuple[Coding, tuple[str, ...]]:
    _check_floats(weights, 8, MX_BLOCK)
    return PlainCodes(CodeKind.E4M3, Blocks(1, MX_BLOCK), "weight_scale", stored), ("weight_scale",)


def _mxfp4(weights: Fields, stored: StoredTensors | None) -> tuple[Coding, tuple[str, ...]]:
    _check_floats(weights, 4, MX_BLOCK)
    return FourBitFloats(*_PACKED, stored), _PACKED


def _nvfp4(weights: Fields, stored: StoredTensors | None) -> tuple[Coding, tuple[str, ...]]:
    _check_floats(weights, 4, NV_BLOCK)
    coding = FourBitFloats(*_PACKED, stored, "weight_global_scale", divides=True)
    return coding, _PACKED


_CODINGS: Mapping[str, Callable[[Fields, StoredTensors | None], tuple[Coding, tuple[str, ...]]]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "naive-quantized": _plain,
    "mxfp8-quantized": _mxfp8,
    "mxfp4-pack-quantized": _mxfp4,
    "nvfp4-pack-quantized": _nvfp4,
}
"""Coding of a format, and suffixes of tensors that only coded modules have."""


def _group_size(weights: Fields) -> int:
    return checked_group(weights, "group_size", weights.count("group_size", REQUIRED))


def _check_floats(weights: Fields, bits: int, group_size: int) -> None:
    weights.only("type", ("float",), "float")
    weights.only("num_bits", (bits,), str(bits))
    weights.only("group_size", (group_size,), str(group_size))
    weights.only("symmetric", (True,), "true")


def _check_integer_activations(inputs: Fields, weights: Fields) -> None:
    inputs.only("num_bits", (8,), "8")
    inputs.only("type", ("int",), "int")
    inputs.only("dynamic", (True,), "true: scales of activations that were fixed beforehand are not read")
    inputs.only("symmetric", (True,), "true")
    inputs.only("strategy", ("token",), "token")
    weights.only("strategy", ("channel", "tensor"), "channel, tensor: with integer activations")
    weights.only("symmetric", (True,), "true: with integer activations")
