"""EAGLE-3 draft heads in the published layout: reads a head's `config.json` for the model that it serves.

A head reads hidden states of three layers. `eagle_config.eagle_aux_hidden_state_layer_ids` names layers whose outputs
are read, the same key at the top level (`speculators` layout) layers whose inputs are read. Without either, these are
the inputs of layers 2, n / 2 and n - 3.
"""

from collections.abc import Collection
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.heads import Eagle3Spec
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis, TensorSpec
from tandem.core.errors import UnsupportedCheckpointError

LAYER = "midlayer"  # prefix of its layer's tensors
DIRECTORIES = ("eagle3", "eagle")
"""Names of a head's directory inside that of the model's checkpoint; the first is preferred."""
_OTHER_LAYER = "layers.0"
_UNUSED = ("t2d",)  # marks the model's tokens that the head has; the offsets say the same
_DEFAULTS = base.Defaults(max_positions=2048)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NUM_LAYERS_READ = 3


def parameter_name(name: str) -> str | None:
    """Maps a tensor's name in the checkpoint to Tandem's; None = the tensor is not used."""
    if name in _UNUSED:
        return None
    return name.replace(f"{_OTHER_LAYER}.", f"{LAYER}.", 1) if name.startswith(_OTHER_LAYER) else name


def read_eagle3(fields: Fields, model: ModelSpec, names: Collection[str]) -> Eagle3Spec:
    """Reads a head's spec.

    Args:
        model: the model whose hidden states the head reads.
        names: names of the checkpoint's tensors, as returned by `parameter_name`.

    Raises:
        CheckpointError: it is no such head, or that of another model.
    """
    if "fc.weight" not in names or f"{LAYER}.hidden_norm.weight" not in names:
        raise UnsupportedCheckpointError(
            f"{fields.where}: this is no EAGLE-3 head: fc.weight and {LAYER}.hidden_norm.weight are missing"
        )
    sizes = base.read_sizes(fields, _DEFAULTS)
    _check_model(fields, sizes, model)
    num_tokens = fields.count("draft_vocab_size", sizes.vocab, high=sizes.vocab)
    layers = _read_layers(fields, model)
    hidden = sizes.hidden
    own_embedding = TensorSpec("embed_tokens.weight", (model.vocab_size, hidden))
    has_own = own_embedding.name in names
    if hidden != model.hidden_size and not has_own:
        raise UnsupportedCheckpointError(
            f"{fields.where}: hidden_size={hidden} is not the model's {model.hidden_size}, so the head needs "
            f"{own_embedding.name}, which it lacks"
        )
    bias = fields.flag("attention_bias", False)
    spec = Eagle3Spec(
        layers_read=layers,
        hidden_size=hidden,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        embedding=own_embedding if has_own else None,
        fusion=LinearSpec("fc", hidden, model.hidden_size * len(layers), fields.flag("fc_bias", False)),
        embedding_norm=sizes.norm(f"{LAYER}.input_layernorm"),
        hidden_norm=sizes.norm(f"{LAYER}.hidden_norm"),
        attention=_read_attention(fields, sizes, bias, model.max_position_embeddings),
        feed_forward_norm=sizes.norm(f"{LAYER}.post_attention_layernorm"),
        feed_forward=base.gated(sizes, f"{LAYER}.mlp", bias=fields.flag("mlp_bias", False)),
        final_norm=sizes.norm("norm"),
        head=LinearSpec("lm_head", num_tokens, hidden),
        offsets=TensorSpec("d2t", (num_tokens,), code_dtype="int64") if "d2t" in names else None,
        adds_to_normed=fields.flag("norm_before_residual", False),
    )
    if spec.offsets is None and num_tokens != model.vocab_size:
        raise UnsupportedCheckpointError(
            f"{fields.where}: draft_vocab_size={num_tokens} is less than vocab_size={sizes.vocab}, so the head needs "
            "d2t, which it lacks"
        )
    for key in ("norm_before_fc", "use_aux_hidden_state", "parallel_drafting"):
        fields.only(key, (key == "use_aux_hidden_state",), "absent, or what published EAGLE-3 heads have")
    base.check_unread(fields, ("model_max_length", "num_hidden_layers", "tie_word_embeddings"))
    return spec


def _check_model(fields: Fields, sizes: base.Sizes, model: ModelSpec) -> None:
    """Refuses a head that was trained for another model."""
    if model.streams is not None:
        raise UnsupportedCheckpointError(
            f"{fields.where}: the model has {model.streams.num_streams} residual streams, and a head reads a single one"
        )
    expected = fields.count("target_hidden_size", sizes.hidden, high=1 << 17)
    if expected != model.hidden_size:
        name = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
        raise UnsupportedCheckpointError(
            f"{fields.where}: {name}={expected}, and the model's hidden size is {model.hidden_size}: it is the head of "
            "another model"
        )
    if sizes.vocab != model.vocab_size:
        raise UnsupportedCheckpointError(
            f"{fields.where}: vocab_size={sizes.vocab}, and the model has {model.vocab_size} tokens: it is the head of "
            "another model"
        )
    if sizes.num_layers != 1:
        raise fields.unsupported("num_hidden_layers", "1")


def _read_layers(fields: Fields, model: ModelSpec) -> tuple[int, ...]:
    num_layers = model.num_layers
    nested = fields.section("eagle_config")
    outputs = () if nested is None else nested.indices(_LAYER_IDS, num_layers - 1)
    found = tuple(layer + 1 for layer in outputs) or fields.indices(_LAYER_IDS, num_layers)
    found = found or (2, num_layers // 2, num_layers - 3)
    if len(found) != _NUM_LAYERS_READ or len({*found} & {*range(num_layers)}) != _NUM_LAYERS_READ:
        raise UnsupportedCheckpointError(
            f"{fields.where}: the head reads the inputs of layers {', '.join(map(str, found))}; three different ones "
            f"of the model's {num_layers} are expected: name them in {_LAYER_IDS}"
        )
    return found


def _read_attention(fields: Fields, sizes: base.Sizes, bias: bool, max_positions: int) -> AttentionSpec:
    """Reads the attention. NOTE: its input is twice as wide as the hidden size."""
    prefix = f"{LAYER}.self_attn"
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    narrow = base.attention(sizes, 0, sizes.rope(fields).for_length(max_positions))
    return replace(
        narrow,
        q=LinearSpec(f"{prefix}.q_proj", query, 2 * sizes.hidden, bias),
        k=LinearSpec(f"{prefix}.k_proj", key, 2 * sizes.hidden, bias),
        v=LinearSpec(f"{prefix}.v_proj", key, 2 * sizes.hidden, bias),
        o=LinearSpec(f"{prefix}.o_proj", sizes.hidden, query, bias, ShardAxis.ROW),
    )
