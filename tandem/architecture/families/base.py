"""Reading of configurations common to all families: sizes, special tokens, standard layers, and warnings for unread
keys.

A key that `transformers`' own model of the family never reads cannot change its results: it causes a warning, or an
error if other engines compute something else because of it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tandem.architecture.feed_forward import Activation, FeedForwardSpec, GatedSpec
from tandem.architecture.fields import REQUIRED, Fields, shown_items
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec, MtpNames
from tandem.architecture.rope import DEFAULT_THETA, RopeSpec, flat_rope
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
UNRESOLVED_DTYPE = "auto"  # in a spec, until the loader knows the dtype

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
# Options that `transformers` reads whatever the family: of the configuration's base class, its masks and its caches.
_REFUSED_KEYS = """
    is_encoder_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads
    sliding_window attention_chunk_size use_bidirectional_attention kv_sharing_modes per_layer_config
"""
# Options that `transformers`' models do not read, or only some of them, and other engines do: off in published files.
_REFUSED_IF_ON_KEYS = """
    attention_bias qkv_bias mlp_bias lm_head_bias use_qk_norm use_mrope rope_interleave rope_interleaved
    shared_intermediate_size shared_expert_intermediate_size dual_chunk_attention_config
"""
PER_LAYER_KEYS: Final = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers", "attn_type_list"),
)
"""Lists of one entry a layer, whether the family reads them or not."""
FORMAT_KEYS: Final = ("quantization_config", "compression_config")  # read by the loader
HARMLESS = frozenset(_GENERATION_KEYS.split()) | frozenset(_BOOKKEEPING_KEYS.split()) | frozenset(FORMAT_KEYS)
REFUSED = frozenset(_REFUSED_KEYS.split()) | frozenset(_REFUSED_IF_ON_KEYS.split())

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """Reader of one architecture: its configuration and the names of its tensors.

    `read_model` raises for anything it would not serve exactly. `parameter_name` maps a tensor's name in the checkpoint
    to Tandem's, or to None if it belongs to a part of the model that is not served (a vision tower).
    """

    read_model: Callable[[Fields], ModelSpec]
    parameter_name: Callable[[str], str | None] = lambda name: name


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values that transformers assumes for absent keys. `kv_heads` None = as many as heads, `head_dim` None = hidden /
    heads, a token id None = no such token.

    `rotary_share`: part of each head that is rotated; None = all of it, and nothing else is served. The five sizes that
    define a model have no default except in Gemma, whose files may leave any of them out.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    tied: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    eps: float = 1e-6
    theta: float = DEFAULT_THETA
    rotary_share: float | None = None
    hidden: int = REQUIRED
    intermediate: int = REQUIRED
    layers: int = REQUIRED
    heads: int = REQUIRED
    vocab: int = REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that every family has, as read from the file, with the defaults used. `unit_offset`: whether all norms
    multiply by 1 + their weight.
    """

    defaults: Defaults
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    activation: Activation
    eps: float
    unit_offset: bool = False

    def norm(self, name: str, size: int | None = None) -> NormSpec:
        """A norm over the hidden state, or over `size` elements."""
        return NormSpec(name, self.hidden if size is None else size, self.eps, self.unit_offset)

    def rope(
        self,
        fields: Fields,
        rotary_share: float | None = None,
        harmless: tuple[str, ...] = (),
        default: Mapping[str, object] | None = None,
    ) -> RopeSpec:
        """The rotary embedding, if all layers share one.

        Args:
            rotary_share: share of each head that is rotated, if the family has its own key for it.
            harmless: options of the embedding that change nothing for text.
            default: used if the file does not describe the embedding; None = an unscaled one.
        """
        defaults = self.defaults
        return flat_rope(
            fields,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            theta=defaults.theta,
            default_share=rotary_share or defaults.rotary_share or 1.0,
            served_shares=(1.0,) if defaults.rotary_share is None else None,
            harmless=harmless,
            default=default,
        )


def read_sizes(
    fields: Fields, defaults: Defaults, *, unit_offset: bool = False, activation: Activation | None = None
) -> Sizes:
    """Reads the sizes. `activation`: None = read from the file.

    Raises:
        CorruptCheckpointError: sizes that are missing, absurd or contradict each other, or the length of a list of
            `PER_LAYER_KEYS`.
        UnsupportedCheckpointError: an activation that is not served.
    """
    hidden = fields.count("hidden_size", defaults.hidden, high=1 << 17)
    heads = fields.count("num_attention_heads", defaults.heads, high=1 << 12)
    kv_heads = fields.optional_count("num_key_value_heads", defaults.kv_heads, high=1 << 12) or heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    num_layers = fields.count("num_hidden_layers", defaults.layers, high=1 << 10)
    for name in PER_LAYER_KEYS:
        fields.check_length(name, num_layers)
    return Sizes(
        defaults=defaults,
        hidden=hidden,
        intermediate=fields.count("intermediate_size", defaults.intermediate, high=1 << 20),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_read_head_dim(fields, hidden, heads, defaults.head_dim),
        vocab=fields.count("vocab_size", defaults.vocab),
        max_positions=fields.count("max_position_embeddings", defaults.max_positions),
        activation=activation or _read_activation(fields, defaults.activation_key, defaults.activation),
        eps=fields.number("rms_norm_eps", defaults.eps, high=1.0),
        unit_offset=unit_offset,
    )


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


def layer_prefix(index: int) -> str:
    """Prefix of a layer's tensor names, as in Llama's checkpoints."""
    return f"model.layers.{index}"


def attention(
    sizes: Sizes,
    index: int,
    rope: RopeSpec | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    whole_norms: bool = False,
) -> AttentionSpec:
    """Attention of layer `index` with Llama's tensor names. `head_norms`: a norm on each head of q and k;
    `whole_norms`: one norm over all heads.
    """
    prefix, hidden = f"{layer_prefix(index)}.self_attn", sizes.hidden
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    has_norms = head_norms or whole_norms
    return AttentionSpec(
        q=LinearSpec(f"{prefix}.q_proj", query, hidden, qkv_bias),
        k=LinearSpec(f"{prefix}.k_proj", key, hidden, qkv_bias),
        v=LinearSpec(f"{prefix}.v_proj", key, hidden, qkv_bias),
        o=LinearSpec(f"{prefix}.o_proj", hidden, query, output_bias, ShardAxis.ROW),
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5 if scale is None else scale,
        rope=rope,
        window=window,
        q_norm=sizes.norm(f"{prefix}.q_norm", query if whole_norms else sizes.head_dim) if has_norms else None,
        k_norm=sizes.norm(f"{prefix}.k_norm", key if whole_norms else sizes.head_dim) if has_norms else None,
    )


def gated(sizes: Sizes, prefix: str, intermediate: int | None = None, *, bias: bool = False) -> GatedSpec:
    """A gated feed-forward block with Llama's tensor names under `prefix`."""
    width = sizes.intermediate if intermediate is None else intermediate
    return GatedSpec(
        gate=LinearSpec(f"{prefix}.gate_proj", width, sizes.hidden, bias),
        up=LinearSpec(f"{prefix}.up_proj", width, sizes.hidden, bias),
        down=LinearSpec(f"{prefix}.down_proj", sizes.hidden, width, bias, ShardAxis.ROW),
        activation=sizes.activation,
    )


def pre_norm_layer(
    sizes: Sizes, index: int, mixer: MixerSpec, feed_forward: FeedForwardSpec | None = None
) -> LayerSpec:
    """A layer that norms the input of each block, as Llama. `feed_forward`: None = a gated one of the usual size."""
    prefix = layer_prefix(index)
    return LayerSpec(
        mixer=mixer,
        feed_forward=gated(sizes, f"{prefix}.mlp") if feed_forward is None else feed_forward,
        before_mixer=sizes.norm(f"{prefix}.input_layernorm"),
        before_feed_forward=sizes.norm(f"{prefix}.post_attention_layernorm"),
    )


def pre_norm_layers(
    sizes: Sizes, mixers: Iterable[MixerSpec], blocks: Iterable[FeedForwardSpec | None]
) -> list[LayerSpec]:
    """Layers with these mixers and blocks, in order, each made by `pre_norm_layer`."""
    return [
        pre_norm_layer(sizes, index, mixer, block)
        for index, (mixer, block) in enumerate(zip(mixers, blocks, strict=True))
    ]


def sandwich_layer(
    sizes: Sizes, index: int, mixer: MixerSpec, feed_forward: FeedForwardSpec | None = None
) -> LayerSpec:
    """A layer that norms input and output of each block, as Gemma. `feed_forward`: as in `pre_norm_layer`."""
    prefix = layer_prefix(index)
    return replace(
        pre_norm_layer(sizes, index, mixer, feed_forward),
        after_mixer=sizes.norm(f"{prefix}.post_attention_layernorm"),
        before_feed_forward=sizes.norm(f"{prefix}.pre_feedforward_layernorm"),
        after_feed_forward=sizes.norm(f"{prefix}.post_feedforward_layernorm"),
    )


def build_model(
    family: str,
    fields: Fields,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    *,
    embedding_scale: float = 1.0,
    logit_softcap: float = 0.0,
    logit_scale: float = 1.0,
    unserved: tuple[str, ...] = (),
    mtp_layers: tuple[LayerSpec, ...] = (),
    mtp_names: MtpNames | None = None,
) -> ModelSpec:
    """The model with these layers; special tokens, and whether embedding and head are tied, are read from `fields`."""
    defaults = sizes.defaults
    return ModelSpec(
        family=family,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.max_positions,
        layers=tuple(layers),
        final_norm=sizes.norm("model.norm"),
        dtype=UNRESOLVED_DTYPE,
        tie_word_embeddings=fields.flag("tie_word_embeddings", defaults.tied),
        eos_token_ids=_read_eos(fields, defaults.eos_token_id),
        bos_token_id=_read_bos(fields, defaults.bos_token_id),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        unserved=unserved,
        mtp_layers=mtp_layers,
        mtp_names=mtp_names,
    )


def _read_bos(fields: Fields, default: int | None) -> int | None:
    """Id of the token that begins a text. Some files hold a list, of which the first counts; `default` when absent."""
    ids = fields.token_ids("bos_token_id") if fields.has("bos_token_id") else (default,)
    return ids[0] if ids else None


def _read_eos(fields: Fields, default: int | None) -> tuple[int, ...]:
    """The ids that end a completion; `default` when the key is absent."""
    if fields.has("eos_token_id"):
        return fields.token_ids("eos_token_id")
    return () if default is None else (default,)


def read_layer_types(
    fields: Fields, num_layers: int, kinds: Collection[str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """The list `layer_types`, checked to contain only `kinds`; None when absent."""
    fields.check_length("layer_types", num_layers)
    types = fields.texts("layer_types")
    if types is not None and not {*types} <= {*kinds}:
        raise fields.unsupported("layer_types", ", ".join(kinds))
    return types


def check_unread(fields: Fields, harmless: Collection[str] = (), refused: Collection[str] = ()) -> None:
    """Ends the reading of `fields`: warns of keys that were not read, and refuses some of them.

    Args:
        harmless: keys that need no warning, besides those common to all families.
        refused: keys that transformers' model of the family reads and Tandem's does not; empty values pass.

    Raises:
        UnsupportedCheckpointError: a key in `refused`, or one that no family serves, has a value.
    """
    fields.only("is_causal", (True,), "true")
    if not fields.was_read("layer_types") and not set(fields.texts("layer_types") or ()) <= {FULL}:
        raise fields.unsupported("layer_types", FULL)
    unread = fields.unread(HARMLESS.union(harmless))
    for name in sorted(unread):
        if name in REFUSED.union(refused) and unread[name]:
            raise fields.unsupported(name, "absent or off")
    others = {name: value for name, value in unread.items() if name not in REFUSED.union(refused)}
    if others:
        _log.warning("%s: %s: not read by this architecture, so without effect", fields.where, shown_items(others))
