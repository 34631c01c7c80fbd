"""GraniteMoeForCausalLM: reads the `config.json` of Granite 3's mixtures of experts into a `ModelSpec`: as `granite`,
with the blocks of `granite_experts`.
"""

from tandem.architecture.families import base, granite
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.granite_experts import read_blocks
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, granite.DEFAULTS)
    mixers = map(granite.read_attention(fields, sizes, sizes.rope(fields)), range(sizes.num_layers))
    model = granite.build_model(
        "granite_moe", fields, sizes, base.pre_norm_layers(sizes, mixers, read_blocks(fields, sizes))
    )
    base.check_unread(fields, TRAINING_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
