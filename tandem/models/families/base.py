"""What every family reads the same way, and the lists of keys that are known to be without effect on the results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tandem.kernels.base import Activation
from tandem.models.config import LayerConfig, ModelConfig, RopeConfig
from tandem.models.fields import REQUIRED, Fields

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
FULL, SLIDING = "full_attention", "sliding_attention"
UNRESOLVED_DTYPE = "auto"

_GENERATION_KEYS = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens cache_implementation
"""
_BOOKKEEPING_KEYS = """
    architectures model_type transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash use_cache
    output_hidden_states output_attentions return_dict chunk_size_feed_forward id2label label2id num_labels problem_type
    initializer_range attention_dropout auto_map attn_implementation _attn_implementation _attn_implementation_autoset
    pad_token_id sep_token_id decoder_start_token_id tokenizer_class task_specific_params finetuning_task prefix
    torchscript use_bfloat16 is_decoder tf_legacy_loss pretraining_tp unsloth_fixed unsloth_version is_llama_config
    transformers.js_config tie_last_hidden_states
"""
_OFF_KEYS = """
    is_encoder_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads use_mrope
    rope_interleaved num_experts num_local_experts attention_chunk_size use_bidirectional_attention mlp_bias
    attention_bias attn_logit_softcapping final_logit_softcapping use_sliding_window sliding_window
"""
HARMLESS = frozenset(_GENERATION_KEYS.split()) | frozenset(_BOOKKEEPING_KEYS.split())
OFF = frozenset(_OFF_KEYS.split())


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is read.

    `read_config` raises for anything it would not serve exactly. `parameter_name` maps a tensor's name in the
    checkpoint to ours, or to None where it belongs to a part of the model that is not served (a vision tower).
    """

    read_config: Callable[[Fields], ModelConfig]
    parameter_name: Callable[[str], str | None] = lambda name: name


@dataclass(frozen=True, slots=True)
class Defaults:
    """What transformers assumes for keys that are absent. None: as many KV heads as heads, hidden / heads, no token.

    The five sizes that define a model have no default except in Gemma, whose files may leave any of them out.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    tied: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    hidden: int = REQUIRED
    intermediate: int = REQUIRED
    layers: int = REQUIRED
    heads: int = REQUIRED
    vocab: int = REQUIRED


def read_plain(family: str, fields: Fields, defaults: Defaults) -> ModelConfig:
    """The part that all families share, as a Llama without biases; its `layers` are empty, for the family to fill in.

    Raises:
        CorruptCheckpointError: sizes that are missing, absurd or contradict each other.
        UnsupportedCheckpointError: an activation that is not served.
    """
    hidden = fields.count("hidden_size", defaults.hidden, high=1 << 17)
    heads = fields.count("num_attention_heads", defaults.heads, high=1 << 12)
    kv_heads = fields.optional_count("num_key_value_heads", defaults.kv_heads, high=1 << 12) or heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = _read_head_dim(fields, hidden, heads, defaults.head_dim)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size", defaults.intermediate, high=1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size", defaults.vocab),
        max_position_embeddings=fields.count("max_position_embeddings", defaults.max_positions),
        layers=(),
        activation=_read_activation(fields, defaults.activation_key, defaults.activation),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        attention_scale=head_dim**-0.5,
        dtype=UNRESOLVED_DTYPE,
        tie_word_embeddings=fields.flag("tie_word_embeddings", defaults.tied),
        eos_token_ids=_read_eos(fields, defaults.eos_token_id),
        bos_token_id=_read_bos(fields, defaults.bos_token_id),
    )


def read_layer_count(fields: Fields, defaults: Defaults) -> int:
    return fields.count("num_hidden_layers", defaults.layers, high=1 << 10)


def _read_head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    head_dim = fields.optional_count("head_dim", default, low=2, high=1 << 12)
    if head_dim is None and hidden % heads:
        raise fields.wrong("num_attention_heads", f"a divisor of hidden_size={hidden}")
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise fields.wrong("head_dim", f"even, because rotary embedding turns pairs (it is {head_dim})")
    return head_dim


def _read_activation(fields: Fields, key: str, default: str) -> Activation:
    name = fields.text(key, default) or default
    if name not in ACTIVATIONS:
        raise fields.unsupported(key, ", ".join(sorted(ACTIVATIONS)))
    return ACTIVATIONS[name]


def _read_bos(fields: Fields, default: int | None) -> int | None:
    """`default` when absent; some files hold a list, of which the first counts."""
    ids = fields.token_ids("bos_token_id") if fields.has("bos_token_id") else (default,)
    return ids[0] if ids else None


def _read_eos(fields: Fields, default: int | None) -> tuple[int, ...]:
    """The ids that end a completion; `default` when the key is absent."""
    if fields.has("eos_token_id"):
        return fields.token_ids("eos_token_id")
    return () if default is None else (default,)


def uniform_layers(count: int, rope: RopeConfig, window: int | None = None) -> tuple[LayerConfig, ...]:
    """Every layer alike."""
    return (LayerConfig(window, rope),) * count


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types`, checked; None when absent."""
    types = fields.texts("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers={num_layers} names")
    if not set(types) <= {FULL, SLIDING}:
        raise fields.unsupported("layer_types", f"{FULL}, {SLIDING}")
    return types


def finish(fields: Fields, harmless: frozenset[str] = frozenset()) -> None:
    """Refuses quantised weights by name, then every key that nobody read."""
    for key in ("quantization_config", "compression_config"):
        if fields.get(key):
            raise fields.unsupported(key, "unquantised float32, bfloat16 or float16 weights")
    fields.finish(HARMLESS | harmless, OFF)
