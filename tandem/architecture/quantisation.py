"""Table of the quantised checkpoint formats that are served: the module that reads each, and the bits per weight in
memory.

Keys are the `quant_method` of a `quantization_config`. Bits per weight include its share of scales and zero points.
They are estimates for planning; the exact layout of the tensors is known only to the reader in
`tandem.compute.weights`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.architecture.families.base import FORMAT_KEYS
from tandem.architecture.fields import Fields, read_json_object
from tandem.architecture.model import HEAD, ModelSpec
from tandem.architecture.tensors import TensorSpec
from tandem.core.errors import CorruptCheckpointError

_SCALE_BITS, _OFFSET_BITS, _WIDE_SCALE_BITS, _SMALL_SCALE_BITS = 16, 32, 32, 8
_DENSE_BITS = 16
_GGUF_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q8_0": 8.5,
    "IQ4_NL": 4.5,
    "MXFP4": 4.25,
    "Q2_K": 5.125,
    "Q3_K": 4.5625,
    "Q4_K": 4.625,
    "Q5_K": 8.625,
    "Q6_K": 8.5625,
}
_EXPERT_DTYPE = "expert_dtype"
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_MX_BLOCK, _NV_BLOCK, _BNB_BLOCK, _FP8_BLOCK = 32, 16, 64, 128


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised format: its reader, and the bits per weight that a configuration implies. "Codes" are quantised
    numbers.

    Args:
        module: module in `tandem.compute.weights` whose `read` returns the formats of quantised weights.
        bits: bits of one quantised number, read from the configuration.
        has: whether a weight may be quantised; heads and routers are excluded anyway.
        has_tables: whether heads and embeddings are quantised too.
        expert_bits: bits of one quantised number of an expert; None = the same as of other weights.
    """

    module: str
    bits: Callable[[Fields], float]
    has: Callable[[TensorSpec], bool] = lambda weight: True
    has_tables: bool = False
    expert_bits: Callable[[Fields], float | None] = lambda fields: None


def read_config(directory: Path) -> Fields:
    """The `config.json` of a directory. For older ModelOpt checkpoints, the quantisation in their separate file is
    added.

    Raises:
        CorruptCheckpointError: one of the files cannot be read.
    """
    config, modelopt_config = read_json_object(directory / _CONFIG), directory / _MODELOPT_CONFIG
    if modelopt_config.is_file() and not any(config.get(key) for key in FORMAT_KEYS):
        found = Fields(read_json_object(modelopt_config), str(modelopt_config)).get("quantization")
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{modelopt_config} has no object `quantization`; download it again")
        config[FORMAT_KEYS[0]] = {"quant_method": "modelopt", **found}
    return Fields(config, str(directory / _CONFIG))


def find_quantisation(fields: Fields) -> Fields | None:
    """The `quantization_config` of a `config.json`, of the whole model or of its text part; None = it has none.

    Raises:
        UnsupportedCheckpointError: the format is not served.
    """
    for section in filter(None, (fields, fields.section("text_config"))):
        for key in FORMAT_KEYS:
            found = section.section(key)
            if found is not None:
                found = _with_experts(found, section)
                if (found.text("quant_method") or "") not in QUANTISED:
                    raise found.unsupported("quant_method", ", ".join(sorted(QUANTISED)))
                return found
    return None


def _with_experts(quantisation: Fields, config: Fields) -> Fields:
    """`quantisation` with the dtype of experts, which DeepSeek-V4 has outside the `quantization_config`."""
    experts = config.text(_EXPERT_DTYPE)
    return quantisation if experts is None else quantisation.completed({_EXPERT_DTYPE: experts})


def quantised(quantisation: Fields) -> Quantised:
    """The row of the table for a configuration that `find_quantisation` returned."""
    return QUANTISED[quantisation.text("quant_method") or ""]


def mean_weight_bits(quantisation: Fields, model: ModelSpec) -> float:
    """Mean bits in memory of all weights. Modules that the configuration excludes by name are counted as quantised."""
    row = quantised(quantisation)
    if row.has_tables:
        return row.bits(quantisation)
    weights = (weight for weight in model.weights() if weight.name != HEAD and not weight.is_small and row.has(weight))
    num_coded, total = sum(weight.size for weight in weights), sum(tensor.size for tensor in model.tensors())
    bits, expert_bits = row.bits(quantisation), row.expert_bits(quantisation)
    found = num_coded * bits + (total - num_coded) * _DENSE_BITS
    if expert_bits is not None:
        found += _num_of_experts(model) * (expert_bits - bits)
    return found / total


def _num_of_experts(model: ModelSpec) -> int:
    """Number of elements of all experts."""
    return sum(
        routed.num_experts * routed.expert_size for layer in model.layers if (routed := layer.routed) is not None
    )


def _code_bits(bits: int) -> int:
    """Bits in memory of an integer that has `bits` bits in the checkpoint."""
    return 4 if bits <= 4 else 8


def _integer_bits(bits: int, group_size: int, *, has_zeros: bool) -> float:
    scale_bits = _SCALE_BITS + (_OFFSET_BITS if has_zeros else 0)
    return _code_bits(bits) + (scale_bits / group_size if group_size > 0 else 0)


def _gptq_bits(fields: Fields) -> float:
    bits, group_size = fields.count("bits"), fields.count("group_size", -1, low=-1)
    return _integer_bits(bits, group_size, has_zeros=not fields.flag("sym", False))


def _awq_bits(fields: Fields) -> float:
    return _integer_bits(fields.count("bits", 4), fields.count("group_size", 128, low=-1), has_zeros=True)


def _fp8_bits(fields: Fields) -> float:
    return 8 + (_WIDE_SCALE_BITS / _FP8_BLOCK if fields.get("weight_block_size") else 0)


def _fp8_expert_bits(fields: Fields) -> float | None:
    return 4 + _SMALL_SCALE_BITS / _MX_BLOCK if fields.text(_EXPERT_DTYPE) == "fp4" else None


def _modelopt_bits(fields: Fields) -> float:
    return 8 if fields.text("quant_algo") == "FP8" else 4 + _SMALL_SCALE_BITS / _NV_BLOCK


def _compressed_bits(fields: Fields) -> float:
    """Bits of the first group of modules, which covers nearly all weights in published files."""
    groups = fields.section("config_groups")
    group = None if groups is None else groups.section(next(iter(groups.unread()), ""))
    weights = None if group is None else group.section("weights")
    if weights is None:
        raise fields.wrong("config_groups", "an object of groups, each with weights")
    bits, group_size = weights.count("num_bits", 8, low=2, high=8), weights.optional_count("group_size", low=-1) or -1
    if weights.text("type", "int") == "float" and group_size > 0:
        return bits + _SMALL_SCALE_BITS / group_size
    return _integer_bits(bits, group_size, has_zeros=not weights.flag("symmetric", True))


def _gguf_bits(fields: Fields) -> float:
    """Mean over all GGUF types, weighted by their numbers of elements; floats count as 16 bits."""
    counts = fields.section("numbers")
    found = {name: 0 if counts is None else counts.count(name) for name in (counts.unread() if counts else ())}
    total = sum(found.values())
    bits = sum(count * _GGUF_BITS.get(name, _DENSE_BITS) for name, count in found.items())
    return bits / total if total else _DENSE_BITS


QUANTISED: Mapping[str, Quantised] = {
    "awq": Quantised("awq", _awq_bits),
    "bitsandbytes": Quantised("bitsandbytes", lambda fields: 4 + _WIDE_SCALE_BITS / _BNB_BLOCK),
    "compressed-tensors": Quantised("compressed_tensors", _compressed_bits),
    "fp8": Quantised("fp8", _fp8_bits, expert_bits=_fp8_expert_bits),
    "gguf": Quantised("gguf", _gguf_bits, has_tables=True),
    "gptq": Quantised("gptq", _gptq_bits),
    "modelopt": Quantised("modelopt", _modelopt_bits),
    "mxfp4": Quantised(
        "mxfp4",
        lambda fields: 4 + _SMALL_SCALE_BITS / _MX_BLOCK,
        lambda weight: weight.source is not None and weight.source.index is not None,
    ),
}
