"""Ministral3ForCausalLM: reads Ministral 3's `config.json` into a `ModelSpec`: as `mistral`, but with no window unless
configured, and queries multiplied by a factor that grows slowly with their position.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import QueryScaling
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec, read_rope

_DEFAULTS = base.Defaults(
    max_positions=262_144,
    kv_heads=8,
    head_dim=128,
    eos_token_id=2,
    bos_token_id=1,
    eps=1e-5,
    hidden=4096,
    intermediate=14336,
    layers=34,
    heads=32,
    vocab=131_072,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    window = fields.optional_count("sliding_window")
    rope, scaling = read_positions(fields, sizes, sizes.head_dim)
    layers = [
        base.pre_norm_layer(
            sizes, index, replace(base.attention(sizes, index, rope, window=window), query_scaling=scaling)
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("ministral3", fields, sizes, layers)
    base.check_unread(fields, refused=("rope_scaling",))
    return model


def read_positions(
    fields: Fields, sizes: base.Sizes, head_dim: int, share: float = 1.0
) -> tuple[RopeSpec, QueryScaling]:
    """The rotary embedding of a `share` of each head, and the scaling of queries, both from `rope_parameters`."""
    parameters = fields.section("rope_parameters")
    if parameters is None:
        raise fields.wrong("rope_parameters", "an object")
    parameters.get("max_position_embeddings")  # a copy that nobody reads
    beta = parameters.optional_number("llama_4_scaling_beta", low=-1.0)
    original = parameters.optional_count("original_max_position_embeddings")
    outer = fields.optional_count("original_max_position_embeddings")  # NOTE: it wins, as for the angles
    if beta is None or original is None:
        raise parameters.wrong("llama_4_scaling_beta", "a number, beside original_max_position_embeddings")
    rope = read_rope(
        fields,
        parameters,
        head_dim=head_dim,
        max_positions=sizes.max_positions,
        default_theta=fields.number("rope_theta", sizes.defaults.theta),
        default_share=share,
        served_shares=(share,),
    )
    return rope, QueryScaling(beta, original if outer is None else outer)


FAMILY = base.Family(_read_model)  # found by `registry`
