"""A Hugging Face `config.json` to a `ModelShape`. Sizes are read, never guessed; what would count wrongly is refused.

Reads more families than are served today (mixtures of experts), because planning them needs sizes only.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.fields import Fields
from tandem.planning.shape import ModelShape

_MOE_TYPES = ("mixtral", "qwen3_moe")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", *_MOE_TYPES)
_GEMMA3: Mapping[str, object] = MappingProxyType(
    {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    }
)
# What transformers assumes for keys that a file leaves out, as published files of these families do.
_DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "mistral": {"num_key_value_heads": 8},
        "mixtral": {"num_key_value_heads": 8},
        "qwen2": {"num_key_value_heads": 32},
        "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
        "qwen3_moe": {"num_key_value_heads": 4},
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
    }
)
_GEMMA_PATTERN, _DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 6, 4096, 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_shape(config: Mapping[str, object], name: str, *, weight_bits: int = 16, kv_bits: int = 16) -> ModelShape:
    """The shape that a `config.json` describes; `name` is how reports call it.

    Raises:
        CheckpointError: a size is missing or impossible, or the family is one whose KV or weights count differently.
    """
    fields = Fields(config, "config.json")
    model_type = fields.text("model_type")
    if model_type is None or model_type not in MODEL_TYPES:
        raise fields.unsupported("model_type", ", ".join(MODEL_TYPES))
    values = config if model_type != "gemma3" else fields.get("text_config")
    if not isinstance(values, Mapping):
        raise fields.wrong("text_config", "an object")
    whole = Fields({**_DEFAULTS.get(model_type, {}), **values}, "config.json")
    return _shape(whole, name, model_type, weight_bits, kv_bits)


def _shape(fields: Fields, name: str, model_type: str, weight_bits: int, kv_bits: int) -> ModelShape:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers", high=4096)
    num_kv_heads = fields.optional_count("num_key_value_heads", high=num_heads) or num_heads
    head_dim = fields.optional_count("head_dim") or _head_dim(fields, hidden, num_heads)
    num_experts, per_token, expert_width = _experts(fields, model_type)
    attention = 2 * hidden * head_dim * (num_heads + num_kv_heads)
    mlp = hidden * num_experts if num_experts else 3 * hidden * fields.count("intermediate_size")
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=_windows(fields, model_type, num_layers),
        num_layer_parameters=num_layers * (attention + mlp),
        num_table_parameters=hidden * fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", model_type.startswith("gemma")),
        max_tokens=fields.count("max_position_embeddings", 32_768),
        num_expert_parameters=3 * hidden * expert_width,
        num_expert_layers=num_layers if num_experts else 0,
        num_experts=num_experts,
        num_experts_per_token=per_token,
        weight_bits=weight_bits,
        kv_bits=kv_bits,
    )


def _head_dim(fields: Fields, hidden: int, num_heads: int) -> int:
    if hidden % num_heads:
        raise fields.wrong("num_attention_heads", f"a divisor of hidden_size={hidden}, or head_dim must be given")
    return hidden // num_heads


def _experts(fields: Fields, model_type: str) -> tuple[int, int, int]:
    """(experts of a layer, experts of a token, width of one); zeros where there are none."""
    if model_type not in _MOE_TYPES:
        return 0, 0, 0
    num_experts = fields.count("num_local_experts" if model_type == "mixtral" else "num_experts")
    per_token = fields.count("num_experts_per_tok", high=num_experts)
    if model_type == "mixtral":
        return num_experts, per_token, fields.count("intermediate_size")
    if fields.get("mlp_only_layers") or fields.count("decoder_sparse_step", 1) != 1:
        raise UnsupportedCheckpointError(f"{fields.where}: layers with and without experts are not planned for")
    return num_experts, per_token, fields.count("moe_intermediate_size")


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, by the rules of its family: `layer_types` where given, else what older files have instead."""
    window = fields.optional_count("sliding_window", None if model_type == "llama" else _DEFAULT_WINDOW)
    if window is None or model_type in ("llama", "mixtral"):
        return (None,) * num_layers
    if model_type == "mistral":
        return (window,) * num_layers
    if model_type.startswith("qwen") and not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    types = fields.texts("layer_types") or _older_types(fields, model_type, num_layers)
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise fields.wrong("layer_types", f"{num_layers} of {_FULL!r} and {_SLIDING!r}")
    return tuple(window if kind == _SLIDING else None for kind in types)


def _older_types(fields: Fields, model_type: str, num_layers: int) -> tuple[str, ...]:
    if model_type.startswith("gemma"):
        pattern = fields.count("sliding_window_pattern", _GEMMA_PATTERN)
        return tuple(_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers))
    lowest = fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return tuple(_SLIDING if i >= lowest else _FULL for i in range(num_layers))
