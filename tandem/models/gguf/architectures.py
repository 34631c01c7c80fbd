"""GGUF architectures as Hugging Face configurations, with each tensor's name and row order there.

A key of the architecture that is not read here might change the results, so it is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "token_embd.weight"
_DEFAULT_THETA = 10_000.0
_HARMLESS = ("rope.scaling.finetuned",)
_OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Llama 3.1 and later: what `rope_freqs` is computed from, the same in every published checkpoint but for the factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table.

    Args:
        model_type, class_name: what transformers calls it.
        inner: names of a layer's tensors there, by GGUF's.
        is_permuted: q and k rows of each head are in the order of pairs that turn together, and not of halves.
        has_bias_option: `attention_bias` says whether projections have biases; otherwise the family always knows.
    """

    model_type: str
    class_name: str
    inner: Mapping[str, str]
    is_permuted: bool = False
    has_bias_option: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _INNER, is_permuted=True, has_bias_option=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _INNER),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _INNER | _HEAD_NORMS),
}


def find_architecture(file: GgufFile) -> tuple[str, Architecture]:
    """The architecture's name in GGUF, and its row of the table.

    Raises:
        UnsupportedCheckpointError: it is none of the table's, or the file is one of several.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptCheckpointError(f"{file.path}: general.architecture is missing; convert or download it again")
    if name not in ARCHITECTURES:
        raise UnsupportedCheckpointError(
            f"{file.path}: general.architecture={name!r} is not served from GGUF; supported: "
            f"{', '.join(ARCHITECTURES)}: take the model's Hugging Face directory instead"
        )
    num_parts = file.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise UnsupportedCheckpointError(
            f"{file.path}: split.count={num_parts}: it is one of several files; join them with "
            "`llama-gguf-split --merge`"
        )
    return name, ARCHITECTURES[name]


def read_config(file: GgufFile, dtype: str) -> dict[str, object]:
    """`config.json` of the model.

    Raises:
        CorruptCheckpointError: a value is missing, absurd or contradicts the tensors.
        UnsupportedCheckpointError: a value that is not served.
    """
    name, architecture = find_architecture(file)
    fields = Fields(_of(file, name), f"{file.path}: {name}")
    heads = fields.count("attention.head_count", high=1 << 12)
    hidden = fields.count("embedding_length", high=1 << 17)
    head_dim = fields.count("attention.key_length", hidden // heads, low=2, high=1 << 12)
    fields.only("attention.value_length", (head_dim,), f"as attention.key_length, {head_dim}")
    fields.only("rope.dimension_count", (head_dim,), f"all {head_dim} elements of a head")
    fields.only("vocab_size", (_num_rows(file, EMBEDDING),), f"the rows of {EMBEDDING}, {_num_rows(file, EMBEDDING)}")
    config: dict[str, object] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length", high=1 << 20),
        "num_hidden_layers": fields.count("block_count", high=1 << 10),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads, high=1 << 12),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _as_written(_number(fields, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(fields.number("rope.freq_base", _DEFAULT_THETA)),
        "max_position_embeddings": fields.count("context_length"),
        "vocab_size": _num_rows(file, EMBEDDING),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if architecture.has_bias_option and "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    scaling = _read_scaling(file, fields, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    fields.refuse_unread(_HARMLESS)
    return config


def checkpoint_name(file: GgufFile, architecture: Architecture, name: str) -> str | None:
    """Name of a GGUF tensor in a Hugging Face checkpoint; None for one that became part of the configuration.

    Raises:
        UnsupportedCheckpointError: the architecture has no such tensor.
    """
    if name == ROPE_FACTORS:
        return None
    found = _LAYER.fullmatch(name)
    if name in _OUTER:
        return _OUTER[name]
    if found is None or found[2] not in architecture.inner:
        raise UnsupportedCheckpointError(
            f"{file.path}: tensor {name!r} is none of {architecture.class_name}'s, so the file is of another model "
            "than it says"
        )
    return f"model.layers.{found[1]}.{architecture.inner[found[2]]}.{found[3]}"


def in_halves(
    rows: NDArray[np.uint8], name: str, architecture: Architecture, config: Mapping[str, object]
) -> NDArray[np.uint8]:
    """The rows of a tensor, those of each head's halves after each other where GGUF has them in turn.

    Args:
        rows: [num_rows, bytes of each].
        config: as of `read_config`.

    Raises:
        CorruptCheckpointError: the heads do not divide the rows.
    """
    found = _LAYER.fullmatch(name)
    if not architecture.is_permuted or found is None or found[2] not in ("attn_q", "attn_k"):
        return rows
    num_heads = config["num_attention_heads" if found[2] == "attn_q" else "num_key_value_heads"]
    assert isinstance(num_heads, int)
    if len(rows) % (2 * num_heads):
        raise CorruptCheckpointError(f"tensor {name!r} has {len(rows)} rows, which {num_heads} heads do not divide")
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [head, pair, half, bytes]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _read_scaling(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, object] | None:
    """`rope_scaling`; None = there is none."""
    kind = fields.text("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        fields.only("rope.scaling.type", ("none",), f"none beside {ROPE_FACTORS}")
        return _llama3_scaling(file, fields, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.unsupported("rope.scaling.type", "none, linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": _as_written(_number(fields, "rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.count("rope.scaling.original_context_length")
    else:
        fields.get("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, object]:
    """The settings from which `rope_freqs`, divisors of the frequencies, were computed.

    Raises:
        UnsupportedCheckpointError: it was computed in another way than Llama 3.1's.
    """
    entry = file.tensors[ROPE_FACTORS]
    if entry.shape != (head_dim // 2,) or entry.type_name != "F32":
        raise CorruptCheckpointError(f"{file.path}: {ROPE_FACTORS} must be {head_dim // 2} numbers of float32")
    divisors = file.rows(entry).reshape(-1).view(np.float32).astype(np.float64)
    factor = float(divisors.max())
    theta = fields.number("rope.freq_base", _DEFAULT_THETA)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_LENGTH / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / (np.clip(smooth, 0, 1) * (1 - 1 / factor) + 1 / factor) if factor > 0 else np.zeros_like(divisors)
    if not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise UnsupportedCheckpointError(
            f"{file.path}: {ROPE_FACTORS} is not Llama 3.1's scaling by {factor:g} of {_LLAMA3_LENGTH} positions; "
            "other scalings are not read from GGUF"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }


def _of(file: GgufFile, name: str) -> dict[str, object]:
    """The values under an architecture's name."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise CorruptCheckpointError(f"{file.path} has no tensor {name!r}; download or convert it again")
    return file.tensors[name].shape[0]


def _number(fields: Fields, name: str) -> float:
    value = fields.optional_number(name)
    if value is None:
        raise fields.wrong(name, "a number")
    return value


def _as_written(value: float) -> float:
    """The shortest decimal that float32 stores as it stores `value`: what the configuration had, as 1e-05."""
    return float(str(np.float32(value)))
