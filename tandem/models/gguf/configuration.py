"""Translation of a GGUF file's metadata into a Hugging Face `config.json`: here the keys that all architectures share,
and by `Architecture.read` the others.

A key of the architecture that is not read here might change the results, so it is refused.
"""

import math

import numpy as np

from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.architectures import find_architecture
from tandem.models.gguf.families.base import (
    EMBEDDING,
    LONG_FACTORS,
    ROPE_FACTORS,
    Architecture,
    as_written,
    required,
)
from tandem.models.gguf.file import GgufFile

_DEFAULT_THETA = 10_000.0
_HARMLESS = ("rope.scaling.finetuned",)
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# Llama 3.1 and later: what `rope_freqs` is computed from, the same in every published checkpoint but for the factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192


def read_config(file: GgufFile, dtype: str) -> dict[str, object]:
    """The model's `config.json`.

    Raises:
        CorruptCheckpointError: a value is missing, absurd or contradicts the tensors.
        UnsupportedCheckpointError: a value that is not served.
    """
    name, architecture = find_architecture(file)
    fields = Fields(_of(file, name), f"{file.path}: {name}")
    heads = fields.count("attention.head_count", high=1 << 12)
    hidden = fields.count("embedding_length", high=1 << 17)
    num_tokens = _num_rows(file, EMBEDDING)
    fields.only("vocab_size", (num_tokens,), f"the rows of {EMBEDDING}, {num_tokens}")
    if architecture.with_experts is not None:
        for key in ("expert_count", "expert_used_count"):
            fields.only(key, (0,), "0")
    kv_heads, head_dim = (
        _read_latent_heads(fields, heads)
        if architecture.is_latent
        else _read_heads(fields, architecture, heads, hidden // heads)
    )
    config: dict[str, object] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": _read_width(fields),
        **_read_num_layers(fields, architecture),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        architecture.activation[0]: architecture.activation[1],
        "rms_norm_eps": required(fields, "attention.layer_norm_rms_epsilon"),
        "rope_theta": as_written(fields.number("rope.freq_base", _DEFAULT_THETA)),
        "max_position_embeddings": fields.count("context_length"),
        "vocab_size": num_tokens,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if architecture.has_bias_option and "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    config |= _read_rope_share(fields, architecture, head_dim)
    scaling = _read_scaling(file, fields, architecture, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= architecture.read(file, fields, config)
    fields.refuse_unread(_HARMLESS)
    return config


def _read_heads(fields: Fields, architecture: Architecture, heads: int, share: int) -> tuple[int, int]:
    """Number of KV heads in layers with attention, and size of a head. `share`: hidden size / number of heads."""
    head_dim = fields.count("attention.key_length", share, low=2, high=1 << 12)
    fields.only("attention.value_length", (head_dim,), f"as attention.key_length, {head_dim}")
    name = "attention.head_count_kv"
    if not architecture.is_hybrid or not isinstance(fields.get(name), list):
        return fields.count(name, heads, high=1 << 12), head_dim
    return _read_for_some(fields, name, 1 << 12), head_dim


def _read_latent_heads(fields: Fields, heads: int) -> tuple[int, int]:
    """Number of KV heads, the same as of query heads since all share one latent, and size of the rotated part of a
    head.

    NOTE: files give the latent's sizes as those of a single head. Files from before 2025 give the heads' sizes.
    """
    counts = fields.get("attention.head_count_kv")
    given = [count for count in counts if count] if isinstance(counts, list) else [counts]
    if not given or {*given} - {None, 1, heads}:
        raise fields.wrong("attention.head_count_kv", f"1 (a latent), or attention.head_count={heads}")
    return heads, fields.count("rope.dimension_count", low=2, high=1 << 12)


def _read_width(fields: Fields) -> int:
    """Inner size of a layer's feed-forward block, which files with only experts may leave out."""
    name, experts = "feed_forward_length", "expert_feed_forward_length"
    if isinstance(fields.get(name), list):
        return _read_for_some(fields, name, 1 << 20)
    return fields.count(name if fields.has(name) else experts, high=1 << 20)


def _read_for_some(fields: Fields, name: str, high: int) -> int:
    """A value that all layers of a hybrid have in common if they have it; the file's list has 0 for the others."""
    counts, num_layers = fields.get(name), fields.count("block_count", high=1 << 10)
    found = set(fields.indices(name, high)) - {0}
    if not isinstance(counts, list) or len(counts) != num_layers or len(found) != 1:
        raise fields.wrong(name, f"a list of {num_layers} numbers, 0 or one that is the same for all layers")
    return found.pop()


def _read_num_layers(fields: Fields, architecture: Architecture) -> dict[str, object]:
    """Number of layers, without those that predict further tokens, which a file counts among its blocks."""
    num_blocks = fields.count("block_count", high=1 << 10)
    if not architecture.has_mtp:
        return {"num_hidden_layers": num_blocks}
    num_further = fields.count("nextn_predict_layers", 0, low=0, high=num_blocks - 1)
    found: dict[str, object] = {"num_hidden_layers": num_blocks - num_further}
    return found if not num_further or architecture.mtp_key is None else found | {architecture.mtp_key: num_further}


def _read_rope_share(fields: Fields, architecture: Architecture, head_dim: int) -> dict[str, object]:
    if not architecture.has_partial_rope:
        fields.only("rope.dimension_count", (head_dim,), f"all {head_dim} elements of a head")
        return {}
    size = fields.count("rope.dimension_count", head_dim, low=2, high=head_dim)
    return {} if size == head_dim else {"partial_rotary_factor": size / head_dim}


def _read_scaling(
    file: GgufFile, fields: Fields, architecture: Architecture, head_dim: int
) -> dict[str, object] | None:
    """`rope_scaling`; None = there is none."""
    if any(name in file.tensors for name in LONG_FACTORS if name in architecture.factors):
        return _long_scaling(file, fields, fields.count("rope.dimension_count", head_dim))
    kind = fields.text("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        fields.only("rope.scaling.type", ("none",), f"none beside {ROPE_FACTORS}")
        return _llama3_scaling(file, fields, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.unsupported("rope.scaling.type", "none, linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": required(fields, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.count("rope.scaling.original_context_length")
        fields.only("rope.scaling.yarn_ext_factor", (1.0,), "1")
        for theirs, ours in _YARN.items():
            value = fields.optional_number(theirs)
            if value is not None:
                scaling[ours] = as_written(value)
    else:
        fields.get("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, object]:
    """The settings from which `rope_freqs`, divisors of the frequencies, were computed.

    Raises:
        UnsupportedCheckpointError: it was not computed like Llama 3.1's.
    """
    divisors = np.array(_factors(file, ROPE_FACTORS, head_dim // 2))
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


def _long_scaling(file: GgufFile, fields: Fields, rotary_dim: int) -> dict[str, object]:
    """LongRoPE scaling, whose two lists of divisors are tensors; the attention factor may be left out."""
    fields.only("rope.scaling.type", ("none", "longrope"), f"longrope beside {LONG_FACTORS[0]}")
    length, original = fields.count("context_length"), fields.count("rope.scaling.original_context_length", low=2)
    expected = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    factor = fields.number("rope.scaling.attn_factor", expected)
    short, long = (_factors(file, name, rotary_dim // 2) for name in LONG_FACTORS)
    found: dict[str, object] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return found if math.isclose(factor, expected, rel_tol=1e-5) else found | {"attention_factor": as_written(factor)}


def _factors(file: GgufFile, name: str, count: int) -> list[float]:
    entry = file.tensors.get(name)
    if entry is None or entry.shape != (count,) or entry.type_name != "F32":
        raise CorruptCheckpointError(f"{file.path}: {name} must be {count} numbers of float32")
    return [as_written(float(value)) for value in file.rows(entry).reshape(-1).view(np.float32)]


def _of(file: GgufFile, name: str) -> dict[str, object]:
    """The metadata whose keys begin with the architecture's `name`."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise CorruptCheckpointError(f"{file.path} has no tensor {name!r}; download or convert it again")
    return file.tensors[name].shape[0]
