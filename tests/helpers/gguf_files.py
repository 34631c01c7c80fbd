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
    **values: Value | None,
) -> Path:
    """The model of `checkpoint`, with a byte-level tokenizer.

    Args:
        type_name: of the matrices; vectors are float32. Of types that nothing here rounds to, blocks are random.
        extra: more tensors, under GGUF's names.
        values: metadata that replaces what would be written, with __ for dots; None = left out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    architecture: str = config["model_type"]
    replaced = {name.replace("__", "."): value for name, value in values.items()}
    writer = gguf.GGUFWriter(target, str(replaced.pop("general.architecture", architecture)))
    for name, value in (_metadata(config) | replaced).items():
        _add(writer, name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        kind = gguf.GGMLQuantizationType[type_name if tensor.ndim > 1 else "F32"]
        stored = _stored(_in_pairs(tensor, theirs, config), kind)
        writer.add_tensor(theirs, stored, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _stored(tensor: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    if kind.name in _QUANTISED:
        found: NDArray[np.generic] = gguf.quants.quantize(tensor, kind)
        return found
    size, _ = gguf.GGML_QUANT_SIZES[kind]
    return random_rows(kind.name, len(tensor), tensor.shape[1] // size, scale=1e-4, seed=int(1e6 * abs(tensor[0, 0])))


def _in_pairs(tensor: NDArray[np.float32], name: str, config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Llama's q and k with the rows that turn together beside each other, as its original checkpoints had them."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return tensor
    halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _metadata(config: Mapping[str, Any]) -> dict[str, Value | None]:
    name = config["model_type"]
    size = config["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    tokens = [*alphabet, "ab"]
    return {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
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
