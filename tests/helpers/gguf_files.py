"""Builders of small GGUF files out of Hugging Face directories, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from tests.helpers.gguf_more_rules import find_rules
from tests.helpers.gguf_rules import Rules

# Where each block has its scales in float16, as bytes from its beginning.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
_MOST_LAYERS = 8
_NEVER_CODED = ("ffn_gate_inp", "conv", "ssm_a", "ssm_d", "norm")
_QUANTISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # by the package `gguf`

Value = bool | int | float | str | list[Any]


def random_rows(
    type_name: str, num_rows: int = 5, blocks: int = 3, *, scale: float = 0.02, seed: int = 7
) -> NDArray[np.uint8]:
    """Any codes, and scales that a weight may have, of about that size: [num_rows, bytes of each]."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    source = np.random.default_rng(seed)
    stored = source.integers(0, 256, (num_rows * blocks, block_bytes), np.uint8)
    if type_name == "MXFP4":
        stored[:, 0] = 127 + int(np.log2(scale)) + source.integers(-2, 3, len(stored))
        return stored.reshape(num_rows, -1)
    for offset in SCALES.get(type_name, (0,)):
        scales = source.normal(0, scale, (num_rows * blocks, 1)).astype(np.float16)
        stored[:, offset : offset + 2] = scales.view(np.uint8)
    return stored.reshape(num_rows, -1)


def write_gguf(
    checkpoint: Path,
    target: Path,
    *,
    type_name: str = "F32",
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    tensors_of_a_part: int = 0,
    **values: Value | None,
) -> Path:
    """The model of `checkpoint`, as llama.cpp's converter writes it, with a byte-level tokenizer.

    Args:
        type_name: of the matrices; vectors are float32. Of types that nothing here rounds to, blocks are random.
        extra: more tensors, under GGUF's names.
        tensors_of_a_part: it is written as files of so many, of which the first is returned; 0 = as one file.
        values: metadata that replaces what would be written, with __ for dots; None = left out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    rules = find_rules(config)
    tensors = rules.change(load_file(checkpoint / "model.safetensors"), config)
    replaced = {name.replace("__", "."): value for name, value in values.items()}
    architecture = str(replaced.pop("general.architecture", rules.name))
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=tensors_of_a_part)
    for name, value in (_metadata(rules, config) | replaced).items():
        _add(writer, name, value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == rules.name)
    names = gguf.get_tensor_name_map(arch, _MOST_LAYERS)
    for name, tensor in tensors.items():
        theirs = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        is_float = tensor.ndim == 1 or any(part in theirs for part in _NEVER_CODED)
        kind = gguf.GGMLQuantizationType["F32" if is_float or theirs.endswith(".bias") else type_name]
        writer.add_tensor(theirs, _stored(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(target.parent.glob(f"{target.stem}-00001-of-*.gguf")) if tensors_of_a_part else target


def _stored(tensor: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    if kind.name in _QUANTISED:
        found: NDArray[np.generic] = gguf.quants.quantize(tensor, kind)
        return found
    size, _ = gguf.GGML_QUANT_SIZES[kind]
    rows = tensor.reshape(-1, tensor.shape[-1])
    random = random_rows(kind.name, len(rows), rows.shape[1] // size, scale=1e-4, seed=int(1e6 * abs(rows[0, 0])))
    return random.reshape(*tensor.shape[:-1], -1)


def _metadata(rules: Rules, config: Mapping[str, Any]) -> dict[str, Value | None]:
    name, rope = rules.name, config.get("rope_parameters") or {"rope_type": "default"}
    size = config["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    tokens = [*alphabet, "ab"]
    return {
        f"{name}.block_count": config.get("num_hidden_layers"),
        f"{name}.context_length": config.get("max_position_embeddings"),
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        f"{name}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        f"{name}.rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        **{f"{name}.{key}": value for key, value in (_scaling(rope) | rules.keys(config)).items()},
    }


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """That of rope types which the converter writes for every architecture."""
    parameters = rope.get("full_attention", rope)
    if parameters["rope_type"] not in ("linear", "yarn"):
        return {}
    return {
        "rope.scaling.type": parameters["rope_type"],
        "rope.scaling.factor": parameters["factor"],
        "rope.scaling.original_context_length": parameters.get("original_max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": parameters.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": parameters.get("beta_slow"),
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Value | None) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif value is not None:
        writer.add_string(name, value)
