"""Checkpoints in published formats: random codes and scales as their writers lay them, and the numbers that these stand
for by the formats' own definitions, in numpy and apart from the loader.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.helpers import checkpoints

Numbers = NDArray[np.float32]
Words = NDArray[np.int64]
Encoded = tuple[dict[str, torch.Tensor], Numbers]
"""Tensors by the suffix that follows a module's name, and [out, in]."""
Encoder = Callable[[np.random.Generator, int, int], Encoded]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        -1,
        -0.6961928,
        -0.5250731,
        -0.3949175,
        -0.2844414,
        -0.1847734,
        -0.09105004,
        0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.3379152,
        0.4407098,
        0.562617,
        0.7229568,
        1,
    ],
    np.float32,
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = 128


@dataclass(frozen=True)
class Published:
    """A format. `others`: the encoder of modules whose name has that part; None = it stays as it is."""

    config: dict[str, Any]
    encode: Encoder
    others: Mapping[str, Encoder | None] = field(default_factory=dict)

    def encoder(self, module: str) -> Encoder | None:
        """Of the module of that name."""
        return next((encoder for part, encoder in self.others.items() if part in module), self.encode)


def save_published(path: Path, published: Published, coded: Path, decoded: Path, *, seed: int = 0) -> None:
    """The checkpoint in `path` with the matrices of its layers in that format, and one of the numbers of its codes."""
    rng, tensors = np.random.default_rng(seed), checkpoints.read_tensors(path)
    codes, numbers = dict(tensors), dict(tensors)
    for name in sorted(tensors):
        module, encode = name.removesuffix(".weight"), published.encoder(name)
        if encode is None or not _is_coded(name, tensors[name]):
            continue
        parts, found = _encoded(encode, rng, tensors[name].shape)
        del codes[name]
        codes |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
        numbers[name] = torch.from_numpy(found)
    for directory, content in ((coded, codes), (decoded, numbers)):
        directory.mkdir(parents=True)
        for file in path.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        checkpoints.write_tensors(directory, content)
    config = json.loads((coded / "config.json").read_text()) | {"quantization_config": published.config}
    (coded / "config.json").write_text(json.dumps(config))


def _is_coded(name: str, tensor: torch.Tensor) -> bool:
    """Whether it is a matrix of a layer, or a stack of them, and no router or convolution."""
    is_router = name.endswith((".gate.weight", ".router.weight", ".router.layer.weight"))
    is_matrix = (tensor.dim() == 2 and name.endswith(".weight")) or (
        tensor.dim() == 3 and name.endswith("_linear.weight")
    )
    return is_matrix and not is_router and re.match(r"(model|backbone)(\.language_model)?\.layers\.", name) is not None


def _encoded(encode: Encoder, rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    """As `encode`, of a matrix or of a stack of them, one after the other."""
    if len(shape) == 2:
        return encode(rng, *shape)
    stack = [encode(rng, *shape[1:]) for _ in range(shape[0])]
    parts = {suffix: torch.stack([part[suffix] for part, _ in stack]) for suffix in stack[0][0]}
    if "weight_shape" in parts:
        parts["weight_shape"] = parts["weight_shape"][0]
    return parts, np.stack([found for _, found in stack])


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> Numbers:
    """Of about that size."""
    return (rng.uniform(0.5, 1.5, shape) * size).astype(np.float32)


def rounded(values: Numbers, dtype: torch.dtype) -> tuple[torch.Tensor, Numbers]:
    """The values of that dtype, and what they are then."""
    tensor = torch.from_numpy(values).to(dtype)
    return tensor, tensor.float().numpy()


def spread(scales: Numbers, outputs: int, inputs: int, rows: int, columns: int) -> Numbers:
    """[out / rows, in / columns] -> [out, in], blocks at the edges cut."""
    return np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[:outputs, :inputs]


def packed_words(values: Words, bits: int) -> torch.Tensor:
    """[rows, n] below `2 ** bits` -> int32 [rows, words]: a stream of bits, the lowest of the first first."""
    stream = (values[:, :, None] >> np.arange(bits)) & 1
    stream = stream.reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = (stream.reshape(len(values), -1, 32) << np.arange(32, dtype=np.int64)).sum(-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


# fp8


def e4m3_value(byte: NDArray[np.uint8]) -> Numbers:
    """1 bit of sign, 4 of exponent (7 = 1), 3 of mantissa; no infinity."""
    wide = byte.astype(np.int64)
    exponent, mantissa = wide >> 3 & 15, wide & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(wide >= 128, -size, size).astype(np.float32)


def e4m3_codes(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[torch.Tensor, Numbers]:
    """Bytes of all exponents up to 1, so that numbers are below 2, and what they stand for."""
    sign = rng.integers(0, 2, (outputs, inputs)) << 7
    byte = (rng.integers(0, 64, (outputs, inputs)) | sign).astype(np.uint8)
    return torch.from_numpy(byte).view(torch.float8_e4m3fn), e4m3_value(byte)


def fp8(
    rows: int | None,
    columns: int | None,
    suffix: str = "weight_scale_inv",
    scales: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    *,
    has_ranges: bool = False,
) -> Encoder:
    """Codes times scales of blocks; None = all. `shape`: of the stored scales where it is another."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        codes, numbers = e4m3_codes(rng, outputs, inputs)
        height, width = rows or outputs, columns or inputs
        found = random_scales(rng, (-(-outputs // height), -(-inputs // width)), 0.3)
        if scales in (torch.uint8, torch.float8_e8m0fnu):
            exponents = rng.integers(124, 127, found.shape)
            found = (2.0 ** (exponents - 127)).astype(np.float32)
            stored = torch.from_numpy(exponents.astype(np.uint8)).view(scales)
        else:
            stored, found = rounded(found, scales)
        tensors = {"weight": codes, suffix: stored if shape is None else stored.reshape(shape)}
        if has_ranges:
            tensors |= {"activation_scale": torch.tensor(0.3), "input_scale": torch.tensor([0.3])}
        return tensors, numbers * spread(found, outputs, inputs, height, width)

    return encode


# Integers in words


def grouped_numbers(codes: Words, zeros: Words, scales: Numbers, group_of: Words) -> Numbers:
    """`scale * (code - zero)`. `codes` [out, in]; `zeros`, `scales` [out, groups]; `group_of` [in]."""
    return (scales[:, group_of] * (codes - zeros[:, group_of])).astype(np.float32)


def group_of_inputs(inputs: int, group_size: int | None) -> Words:
    """[in]."""
    return np.arange(inputs) // (group_size or inputs)


def ct_packed(bits: int, group_size: int | None, *, has_zeros: bool = False, has_order: bool = False) -> Encoder:
    """compressed-tensors' "pack-quantized"."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        half = 1 << bits - 1
        group_of = group_of_inputs(inputs, group_size)
        if has_order:
            group_of = rng.permutation(group_of)
        shape = (outputs, int(group_of.max()) + 1)
        codes = rng.integers(-half, half, (outputs, inputs))
        zeros = rng.integers(-half, half, shape) if has_zeros else np.zeros(shape, np.int64)
        stored, scales = rounded(random_scales(rng, shape, 0.25 / half), torch.bfloat16)
        tensors = {
            "weight_packed": packed_words(codes + half, bits),
            "weight_scale": stored,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if has_zeros:
            tensors["weight_zero_point"] = packed_words((zeros + half).T, bits).T
        if has_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of).int()
        return tensors, grouped_numbers(codes, zeros, scales, group_of)

    return encode


def ct_int8(group_size: int | None = None, *, is_tensor: bool = False, has_zeros: bool = False) -> Encoder:
    """compressed-tensors' "int-quantized" and "naive-quantized"."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        group_of = group_of_inputs(inputs, group_size)
        shape = (1, 1) if is_tensor else (outputs, int(group_of.max()) + 1)
        codes = rng.integers(-128, 128, (outputs, inputs))
        zeros = rng.integers(-50, 50, shape) if has_zeros else np.zeros(shape, np.int64)
        stored, scales = rounded(random_scales(rng, shape, 0.002), torch.bfloat16)
        tensors = {
            "weight": torch.from_numpy(codes).to(torch.int8),
            "weight_scale": stored[0] if is_tensor else stored,
        }
        if has_zeros:
            tensors["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
        return tensors, grouped_numbers(codes, zeros, scales, group_of)

    return encode


def gptq(
    bits: int, group_size: int | None, *, version: int = 1, is_symmetric: bool = True, has_order: bool = False
) -> Encoder:
    """GPTQ's words, along the inputs."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        group_of = group_of_inputs(inputs, group_size)
        if has_order:
            group_of = rng.permutation(group_of)
        shape = (outputs, int(group_of.max()) + 1)
        codes = rng.integers(0, 1 << bits, (outputs, inputs))
        zeros = np.full(shape, 1 << bits - 1) if is_symmetric else rng.integers(0, 1 << bits, shape)
        stored, scales = rounded(random_scales(rng, shape, 0.5 / (1 << bits)), torch.float16)
        stored_zeros = zeros if version == 2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": packed_words(codes, bits).T,
            "qzeros": packed_words(stored_zeros.T, bits),
            "scales": stored.T,
            "g_idx": torch.from_numpy(group_of).int(),
        }
        return tensors, grouped_numbers(codes, zeros, scales, group_of)

    return encode


def awq(group_size: int) -> Encoder:
    """AWQ's words, along the outputs."""

    def words(values: Words) -> torch.Tensor:
        """[out, n] -> [n, out / 8]."""
        eights = values.T.reshape(values.shape[1], -1, 8)
        return packed_words(eights[:, :, AWQ_ORDER].reshape(values.shape[1], -1), 4)

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        group_of = group_of_inputs(inputs, group_size)
        shape = (outputs, int(group_of.max()) + 1)
        codes, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, shape)
        stored, scales = rounded(random_scales(rng, shape, 0.03), torch.float16)
        tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": stored.T}
        return tensors, grouped_numbers(codes, zeros, scales, group_of)

    return encode


# Floats of 4 bits


def half_bytes(codes: Words) -> torch.Tensor:
    """[rows, n] -> uint8 [rows, n / 2], the even in the lower half."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def mxfp4(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
    """compressed-tensors' "mxfp4-pack-quantized"."""
    codes, exponents = rng.integers(0, 16, (outputs, inputs)), rng.integers(121, 125, (outputs, inputs // 32))
    numbers = E2M1[codes] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
    tensors = {"weight_packed": half_bytes(codes), "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    return tensors, numbers.astype(np.float32)


def fp4_bytes(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
    """DeepSeek-V4's experts: as `mxfp4`, the pairs int8 and the exponents of their own type."""
    tensors, numbers = mxfp4(rng, outputs, inputs)
    codes, scales = tensors["weight_packed"].view(torch.int8), tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": codes, "scale": scales}, numbers


def nvfp4(names: tuple[str, str], *, divides: bool) -> Encoder:
    """`names`: of the codes and of the number for the whole tensor."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        codes = rng.integers(0, 16, (outputs, inputs))
        scales = rng.integers(0x30, 0x50, (outputs, inputs // 16)).astype(np.uint8)
        whole = np.float32(rng.uniform(20, 40))
        numbers = E2M1[codes] * np.repeat(e4m3_value(scales), 16, axis=1) / whole
        tensors = {
            names[0]: half_bytes(codes),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            names[1]: torch.tensor([whole if divides else 1 / whole]),
        }
        return tensors, numbers.astype(np.float32)

    return encode


def bitsandbytes(kind: str, table: Numbers, *, is_nested: bool) -> Encoder:
    """4 bits in blocks of 64, the first of two in the upper half of a byte."""

    def encode(rng: np.random.Generator, outputs: int, inputs: int) -> Encoded:
        codes = rng.integers(0, 16, (outputs, inputs))
        count = outputs * inputs // 64
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [outputs, inputs]}
        scales = random_scales(rng, (count,), 0.4)
        tensors = {"weight.absmax": torch.from_numpy(scales)}
        if is_nested:
            indices, nested_table = rng.integers(0, 256, count), np.linspace(-1, 1, 256).astype(np.float32)
            nested = random_scales(rng, (-(-count // 256),), 0.1)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.40625}
            scales = nested_table[indices] * nested[np.arange(count) // 256] + np.float32(0.40625)
            tensors = {
                "weight.absmax": torch.from_numpy(indices.astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(nested),
                "weight.nested_quant_map": torch.from_numpy(nested_table),
            }
        tensors |= {
            "weight": torch.from_numpy((codes[:, ::2] << 4 | codes[:, 1::2]).astype(np.uint8)).reshape(-1, 1),
            "weight.quant_map": torch.from_numpy(table.copy()),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode())).to(torch.uint8),
        }
        return tensors, table[codes] * np.repeat(scales.reshape(outputs, -1), 64, axis=1)

    return encode


def save_gpt_oss_blocks(path: Path, coded: Path, decoded: Path, *, seed: int = 0) -> None:
    """As `save_published`, of the experts of gpt-oss: outputs before inputs, unlike the floats."""
    rng, tensors = np.random.default_rng(seed), checkpoints.read_tensors(path)
    codes, numbers = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        encoded = [mxfp4(rng, outputs, inputs) for _ in range(experts)]
        blocks = torch.stack([parts["weight_packed"] for parts, _ in encoded])
        del codes[name]
        codes[f"{name}_blocks"] = blocks.view(experts, outputs, inputs // 32, 16)
        codes[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts, _ in encoded])
        numbers[name] = torch.from_numpy(np.stack([found.T for _, found in encoded])).contiguous()
    for directory, content in ((coded, codes), (decoded, numbers)):
        directory.mkdir(parents=True)
        for file in path.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        checkpoints.write_tensors(directory, content)
    checkpoints.edit_config(coded, quantization_config=MXFP4)


def compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$", r"re:.*router$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.20.0",
    }


def integers(bits: int, strategy: str, group_size: int | None = None, **options: Any) -> dict[str, Any]:
    """A scheme of weights of compressed-tensors."""
    scheme = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, "symmetric": True}
    return scheme | {"dynamic": False, "actorder": None, "block_structure": None} | options


def floats(bits: int, strategy: str, group_size: int | None = None, **options: Any) -> dict[str, Any]:
    """As `integers`."""
    return integers(bits, strategy, group_size) | {"type": "float"} | options


PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
_DYNAMIC = {r"+:.*\.down_proj$": {"bits": 8, "group_size": 64}, r"-:.*\.o_proj$": {}}

FORMATS: dict[str, Published] = {
    "fp8 blocks": Published(_FP8 | {"weight_block_size": [BLOCK, BLOCK]}, fp8(BLOCK, BLOCK)),
    "fp8 blocks of powers of two": Published(
        _FP8 | {"weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0"},
        fp8(BLOCK, BLOCK, scales=torch.float8_e8m0fnu),
        {"q_proj": fp8(BLOCK, BLOCK, scales=torch.uint8), "v_proj": fp8(BLOCK, BLOCK, "scale", torch.uint8)},
    ),
    "fp8 with experts of 4 bits": Published(
        _FP8 | {"weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        fp8(BLOCK, BLOCK, "scale", torch.float8_e8m0fnu),
        {"gate_proj": fp4_bytes, "up_proj": fp4_bytes, "down_proj": fp4_bytes},
    ),
    "fp8 tensors": Published(_FP8 | {"activation_scheme": "static"}, fp8(None, None, shape=(), has_ranges=True)),
    "fp8 channels": Published(_FP8, fp8(1, None, "weight_scale"), {"o_proj": None}),
    "compressed fp8 tensors": Published(
        compressed("float-quantized", floats(8, "tensor")),
        fp8(None, None, "weight_scale", torch.bfloat16, (1,), has_ranges=True),
    ),
    "compressed fp8 channels": Published(
        compressed("float-quantized", floats(8, "channel")), fp8(1, None, "weight_scale", torch.bfloat16)
    ),
    "compressed fp8 blocks": Published(
        compressed("float-quantized", floats(8, "block", block_structure=[BLOCK, BLOCK])),
        fp8(BLOCK, BLOCK, "weight_scale", torch.bfloat16),
    ),
    "compressed int4 groups": Published(compressed("pack-quantized", integers(4, "group", 32)), ct_packed(4, 32)),
    "compressed int4 channels": Published(compressed("pack-quantized", integers(4, "channel")), ct_packed(4, None)),
    "compressed int4 with zero points": Published(
        compressed("pack-quantized", integers(4, "group", 64, symmetric=False)), ct_packed(4, 64, has_zeros=True)
    ),
    "compressed int4 in an order": Published(
        compressed("pack-quantized", integers(4, "group", 32, actorder="group")), ct_packed(4, 32, has_order=True)
    ),
    "compressed int3": Published(compressed("pack-quantized", integers(3, "group", 32)), ct_packed(3, 32)),
    "compressed int5 with zero points": Published(
        compressed("pack-quantized", integers(5, "group", 32, symmetric=False)), ct_packed(5, 32, has_zeros=True)
    ),
    "compressed int8 words": Published(compressed("pack-quantized", integers(8, "channel")), ct_packed(8, None)),
    "compressed int8 channels": Published(compressed("int-quantized", integers(8, "channel")), ct_int8()),
    "compressed int8 tensors": Published(compressed("int-quantized", integers(8, "tensor")), ct_int8(is_tensor=True)),
    "compressed W8A8": Published(compressed("int-quantized", integers(8, "channel"), PER_TOKEN), ct_int8()),
    "compressed int8 groups with zero points": Published(
        compressed("naive-quantized", integers(8, "group", 32, symmetric=False)), ct_int8(32, has_zeros=True)
    ),
    "compressed mxfp4": Published(compressed("mxfp4-pack-quantized", floats(4, "group", 32)), mxfp4),
    "compressed mxfp8": Published(
        compressed("mxfp8-quantized", floats(8, "group", 32)), fp8(1, 32, "weight_scale", torch.uint8)
    ),
    "compressed nvfp4": Published(
        compressed("nvfp4-pack-quantized", floats(4, "tensor_group", 16)),
        nvfp4(("weight_packed", "weight_global_scale"), divides=True),
    ),
    "gptq": Published(_GPTQ, gptq(4, 32)),
    "gptq with zero points": Published(_GPTQ | {"sym": False}, gptq(4, 32, is_symmetric=False)),
    "gptq 2 in an order": Published(
        _GPTQ | {"sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, version=2, is_symmetric=False, has_order=True),
    ),
    "gptq 8 bits": Published(_GPTQ | {"bits": 8, "group_size": -1}, gptq(8, None)),
    "gptq 3 bits": Published(_GPTQ | {"bits": 3, "sym": False}, gptq(3, 32, is_symmetric=False)),
    "gptq 2 bits": Published(_GPTQ | {"bits": 2}, gptq(2, 32)),
    "gptq of several kinds": Published(
        _GPTQ | {"dynamic": _DYNAMIC}, gptq(4, 32), {"down_proj": gptq(8, 64), "o_proj": None}
    ),
    "awq": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64)
    ),
    "modelopt fp8": Published(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8(None, None, "weight_scale", shape=(), has_ranges=True),
    ),
    "modelopt nvfp4": Published(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        nvfp4(("weight", "weight_scale_2"), divides=False),
    ),
    "bitsandbytes nf4": Published(_BNB, bitsandbytes("nf4", NF4, is_nested=False)),
    "bitsandbytes nf4 nested": Published(
        _BNB | {"bnb_4bit_use_double_quant": True}, bitsandbytes("nf4", NF4, is_nested=True)
    ),
}
"""By what tests call them; each with weights alone in codes, but for W8A8, whose rows are rounded too."""


def _mixed() -> Published:
    config = compressed("mixed-precision", integers(4, "group", 32))
    experts = config["config_groups"]["group_0"] | {"targets": [r"re:.*experts\..*"], "format": "pack-quantized"}
    others = {"targets": ["Linear"], "weights": floats(8, "channel"), "format": "float-quantized"}
    config |= {"config_groups": {"experts": experts, "others": others}, "ignore": [*config["ignore"], r"re:.*v_proj$"]}
    return Published(config, fp8(1, None, "weight_scale"), {"experts": ct_packed(4, 32), "v_proj": None})


MIXED = _mixed()
"""Experts in int4, the rest of the layers in fp8, one projection in floats."""


def rounds_rows(path: Path) -> bool:
    """Whether the configuration in `path` says that rows are rounded to 8 bits before they are multiplied."""
    config = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    return any(group.get("input_activations") is not None for group in config.get("config_groups", {}).values())
