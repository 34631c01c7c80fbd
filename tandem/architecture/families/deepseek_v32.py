"""DeepseekV32ForCausalLM: DeepSeek-V3.2. DeepSeek-V3 whose queries attend to 2,048 tokens that they choose.

Layers behind the last one predict further tokens; they are not served.
"""

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import (
    UNUSED_KEYS,
    RoutingDefaults,
    further_layers,
    read_blocks,
    read_dense,
    sigmoid_router,
)
from tandem.architecture.families.indexers import read_indexers
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=163_840,
    head_dim=64,
    eos_token_id=1,
    bos_token_id=0,
    hidden=7168,
    intermediate=18432,
    layers=61,
    heads=128,
    vocab=129_280,
)
_ROUTING = RoutingDefaults(num_experts=256, top_k=8, width=2048, num_groups=8, top_groups=4, num_dense=3, scale=2.5)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    fields.only("rope_interleave", (True,), "true")
    attention = read_latent_attention(fields, sizes, LatentDefaults(), is_interleaved=True)
    sparse = read_indexers(fields, sizes, num_heads=64, is_interleaved=False)
    dense = read_dense(fields, sizes.num_layers, fields.count("first_k_dense_replace", _ROUTING.num_dense, low=0))
    blocks = read_blocks(fields, sizes, sigmoid_router(fields, sizes, _ROUTING), _ROUTING, dense=dense)
    layers = [
        base.pre_norm_layer(sizes, index, sparse(index, attention(index)), block) for index, block in enumerate(blocks)
    ]
    model = base.build_model("deepseek_v32", fields, sizes, layers, unserved=further_layers(fields, sizes))
    base.check_unread(fields, UNUSED_KEYS)
    return model


FAMILY = base.Family(_read_model)
