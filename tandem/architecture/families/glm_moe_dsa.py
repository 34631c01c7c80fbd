"""GlmMoeDsaForCausalLM: reads the `config.json` of GLM-5 into a `ModelSpec`: as `deepseek_v32`, but only some layers
choose the tokens to attend to, and the next ones reuse their choice (`indexers`).

Additional layers that predict further tokens are not served.
"""

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import UNUSED_KEYS, RoutingDefaults
from tandem.architecture.families.indexers import build_sparse_model, read_indexer_types, read_indexers
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=202_752,
    head_dim=64,
    eos_token_id=1,
    bos_token_id=0,
    eps=1e-5,
    hidden=6144,
    intermediate=12288,
    layers=78,
    heads=64,
    vocab=154_880,
)
_ROUTING = RoutingDefaults(num_experts=256, top_k=8, width=2048, num_dense=3, scale=2.5)
_LATENTS = LatentDefaults(query_rank=2048, plain_dim=192, value_dim=256)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    for name in ("rope_interleave", "indexer_rope_interleave"):
        fields.only(name, (True,), "true")
    attention = read_latent_attention(fields, sizes, _LATENTS, is_interleaved=True)
    types = read_indexer_types(fields, sizes.num_layers)
    sparse = read_indexers(fields, sizes, num_heads=32, is_interleaved=True, types=types)
    model = build_sparse_model("glm_moe_dsa", fields, sizes, attention, sparse, _ROUTING)
    base.check_unread(fields, UNUSED_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
