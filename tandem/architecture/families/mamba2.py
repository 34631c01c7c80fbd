"""Mamba2ForCausalLM: reads Mamba-2's `config.json` into a `ModelSpec`. Every layer is a recurrence, without attention
and without a feed-forward block. Sizes and tensor names are those of `backbone`.
"""

from typing import Final

from tandem.architecture.families import backbone, base
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec, ModelSpec

_LONGEST: Final = 1 << 20  # files name no longest sequence: a state has none
_DEFAULTS = base.Defaults(
    max_positions=_LONGEST,
    eos_token_id=2,
    bos_token_id=0,
    hidden=4096,
    intermediate=1,
    layers=64,
    heads=1,
    vocab=32_768,
)
_ATTENTION_KEYS = ("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _read_model(fields: Fields) -> ModelSpec:
    fields.only("hidden_act", ("silu", "swish"), "silu")
    hidden, eps = fields.count("hidden_size", 4096, high=1 << 17), fields.number("layer_norm_epsilon", 1e-5, high=1.0)
    state_space = backbone.read_state_space(
        fields, hidden, eps, ("num_heads", 128), ("head_dim", 64), ("state_size", 128)
    )
    if state_space.inner != fields.count("expand", 2, high=64) * hidden:
        raise fields.wrong("num_heads", f"heads of head_dim={state_space.head_dim} that make expand * hidden_size")
    sizes = base.Sizes(
        defaults=_DEFAULTS,
        hidden=hidden,
        intermediate=state_space.inner,
        num_layers=fields.count("num_hidden_layers", 64, high=1 << 10),
        num_heads=state_space.num_heads,
        num_kv_heads=state_space.num_heads,
        head_dim=state_space.head_dim,
        vocab=fields.count("vocab_size", 32_768),
        max_positions=fields.count("max_position_embeddings", _LONGEST),
        activation="silu",
        eps=eps,
    )
    layers = [
        LayerSpec(
            mixer=state_space.mixer(f"{backbone.layer_prefix(index)}.mixer"),
            feed_forward=None,
            before_mixer=backbone.layer_norm(index, hidden, eps),
            before_feed_forward=None,
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("mamba2", fields, sizes, layers)
    base.check_unread(fields, (*backbone.UNUSED_KEYS, *_ATTENTION_KEYS))
    return model


FAMILY = base.Family(_read_model, backbone.parameter_name)  # found by `registry`
