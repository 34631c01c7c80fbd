"""DeepseekV3ForCausalLM: reads the `config.json` of DeepSeek-V3, R1 and Kimi-K2 into a `ModelSpec`: latent attention
(`latents`), and experts in groups, chosen by sigmoid (`grouped_experts`).

An additional layer after the last one predicts further tokens (multi-token prediction).
"""

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import UNUSED_KEYS, RoutingDefaults, build_model
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

DEFAULTS = base.Defaults(
    max_positions=4096,
    head_dim=64,
    eos_token_id=1,
    bos_token_id=0,
    hidden=7168,
    intermediate=18432,
    layers=61,
    heads=128,
    vocab=129_280,
)
ROUTING = RoutingDefaults(num_experts=256, top_k=8, width=2048, num_groups=8, top_groups=4, num_dense=3, scale=2.5)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, DEFAULTS)
    attention = read_latent_attention(
        fields, sizes, LatentDefaults(), is_interleaved=fields.flag("rope_interleave", True)
    )
    model = build_model("deepseek_v3", fields, sizes, attention, ROUTING)
    base.check_unread(fields, UNUSED_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
