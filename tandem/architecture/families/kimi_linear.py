"""KimiLinearForCausalLM: reads Kimi-Linear's `config.json` into a `ModelSpec`: Kimi delta attention (`kimi_delta`),
latent attention without positions (`latents`) in some layers, and experts as in `deepseek_v3`.
"""

import re

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import (
    UNUSED_KEYS,
    RoutingDefaults,
    mtp_layer_prefixes,
    read_blocks,
    read_dense,
    sigmoid_router,
)
from tandem.architecture.families.kimi_delta import read_delta_attention, read_kinds
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=1 << 20,
    kv_heads=32,
    eos_token_id=163_586,
    bos_token_id=163_584,
    eps=1e-5,
    hidden=2304,
    intermediate=9216,
    layers=27,
    heads=32,
    vocab=163_840,
)
_ROUTING = RoutingDefaults(num_experts=256, top_k=8, width=1024, num_dense=1, scale=2.446)
_LATENTS = LatentDefaults(query_rank=None, has_positions=False)
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_NO_POSITIONS = ("rope_theta", "head_dim")
_LATER_KEYS = (  # of Kimi K3's text model, which has the same name
    *("attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "mla_use_output_gate", "mla_use_rope"),
    *("activation_situ_beta", "activation_situ_linear_beta"),
)
_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _read_model(file: Fields) -> ModelSpec:
    fields = file.renamed(_NAMES)
    fields.only("mla_use_nope", (True,), "true")
    fields.only("use_grouped_topk", (True,), "true")
    sizes = base.read_sizes(fields, _DEFAULTS)
    latent, delta = read_latent_attention(fields, sizes, _LATENTS), read_delta_attention(fields, sizes)
    router = sigmoid_router(fields, sizes, _ROUTING)
    dense = read_dense(fields, sizes.num_layers, fields.count("first_k_dense_replace", 1, low=0))
    blocks = read_blocks(fields, sizes, router, _ROUTING, dense=dense)
    layers = [
        base.pre_norm_layer(sizes, index, latent(index) if kind == base.FULL else delta(index), block)
        for index, (kind, block) in enumerate(zip(read_kinds(fields, sizes.num_layers), blocks, strict=True))
    ]
    model = base.build_model("kimi_linear", fields, sizes, layers, unserved=mtp_layer_prefixes(fields, sizes))
    base.check_unread(fields, (*UNUSED_KEYS, *_NO_POSITIONS), _LATER_KEYS)
    return model


def _parameter_name(name: str) -> str | None:
    """Experts are named as in Mixtral in these checkpoints, everything else as in DeepSeek."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(w[123])\b", lambda found: found[1] + _EXPERT_PARTS[found[2]], name)


FAMILY = base.Family(_read_model, _parameter_name)  # found by `registry`
