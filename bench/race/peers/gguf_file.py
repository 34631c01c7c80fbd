"""A dense checkpoint of Llama or Qwen3 as a GGUF file in bfloat16, as llama.cpp's converter writes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

_FLOAT32_BELOW = 2  # dimensions: norms stay float32


def write_gguf(checkpoint: Path, target: Path) -> None:
    """`target` is there when it is whole."""
    config = json.loads((checkpoint / "config.json").read_text())
    name = {"llama": "llama", "qwen3": "qwen3"}[config["model_type"]]
    partly = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partly, name)
    _add_sizes(writer, config)
    _add_tokenizer(writer, checkpoint, config, "smollm" if name == "llama" else "qwen2")
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118  # no mapping
            theirs = names.get_name(key, try_suffixes=(".weight",))
            assert theirs is not None, key
            _add(writer, theirs, _in_order(key, tensors.get_tensor(key), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partly.rename(target)


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, config: Mapping[str, Any], split: str) -> None:
    """Words that the tokenizer lacks are unused ones. The race asks by token ids."""
    stored = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {item["id"]: item["content"] for item in stored["added_tokens"]}
    words = {number: word for word, number in stored["model"]["vocab"].items()} | special
    normal, control, unused = (int(gguf.TokenType[each]) for each in ("NORMAL", "CONTROL", "UNUSED"))
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(
        [control if number in special else normal if number in words else unused for number in range(size)]
    )
    merges = stored["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])


def _in_order(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Llama's rows of q and k have both halves of a rotation side by side."""
    kind = name.rpartition("_proj.")[0][-2:]
    if config["model_type"] != "llama" or kind not in (".q", ".k"):
        return tensor
    heads = config["num_attention_heads" if kind == ".q" else "num_key_value_heads"]
    return tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim < _FLOAT32_BELOW:
        writer.add_tensor(name, tensor.float().numpy())
        return
    stored = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
