"""DeepseekV32ForCausalLM: reads the `config.json` of DeepSeek-V3.2 into a `ModelSpec`: as `deepseek_v3`, but each query
attends only to the 2,048 tokens that an indexer scores highest (`indexers`).

Additional layers that predict further tokens are not served.
"""

from dataclasses import replace

from tandem.architecture.families import base, deepseek_v3
from tandem.architecture.families.grouped_experts import UNUSED_KEYS
from tandem.architecture.families.indexers import build_sparse_model, read_indexers
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = replace(deepseek_v3.DEFAULTS, max_positions=163_840)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    fields.only("rope_interleave", (True,), "true")
    attention = read_latent_attention(fields, sizes, LatentDefaults(), is_interleaved=True)
    sparse = read_indexers(fields, sizes, num_heads=64, is_interleaved=False)
    model = build_sparse_model("deepseek_v32", fields, sizes, attention, sparse, deepseek_v3.ROUTING)
    base.check_unread(fields, UNUSED_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
