"""Glm4MoeLiteForCausalLM: reads the `config.json` of GLM-4.7-Flash into a `ModelSpec`: as `deepseek_v3`, with other
defaults and a list of the layers without experts.
"""

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import UNUSED_KEYS, RoutingDefaults, build_model, read_dense
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=202_752,
    head_dim=64,
    eos_token_id=1,
    bos_token_id=0,
    eps=1e-5,
    hidden=2048,
    intermediate=10240,
    layers=47,
    heads=20,
    vocab=154_880,
)
_ROUTING = RoutingDefaults(num_experts=64, top_k=4, width=1536, num_dense=1, scale=1.8)
_LATENTS = LatentDefaults(query_rank=768, plain_dim=192, value_dim=256)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    attention = read_latent_attention(fields, sizes, _LATENTS, is_interleaved=fields.flag("rope_interleave", True))
    dense = read_dense(fields, sizes.num_layers, _ROUTING.num_dense)
    model = build_model("glm4_moe_lite", fields, sizes, attention, _ROUTING, dense=dense)
    base.check_unread(fields, UNUSED_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
