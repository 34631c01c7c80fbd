"""GraniteMoeHybridForCausalLM: reads Granite 4's `config.json` into a `ModelSpec`: Mamba-2 layers (`state_space`),
attention in a few, the constant factors of `granite`, and the blocks of `granite_experts`.
"""

from tandem.architecture.families import base, granite
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.granite_experts import read_blocks
from tandem.architecture.families.state_space import CHUNK_KEYS, read_kinds, read_state_space
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec

_UNUSED_KEYS = (*CHUNK_KEYS, "normalization_function", "init_method", "embedding_init_range")
_ROPE = "rope"


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, granite.DEFAULTS)
    width = fields.count("shared_intermediate_size", 1024, high=1 << 20)
    mixers, blocks = _read_mixers(fields, sizes), read_blocks(fields, sizes, width)
    layers = base.pre_norm_layers(sizes, mixers, blocks)
    model = granite.build_model("granite_hybrid", fields, sizes, layers)
    base.check_unread(fields, (*_UNUSED_KEYS, *TRAINING_KEYS))
    return model


def _read_mixers(fields: Fields, sizes: base.Sizes) -> list[MixerSpec]:
    inner = fields.count("mamba_expand", 2, high=64) * sizes.hidden
    state_space = read_state_space(fields, sizes, inner)
    attention = granite.read_attention(fields, sizes, _read_rope(fields, sizes))
    kinds = read_kinds(fields, sizes.num_layers, ("linear_attention", "mamba"), (base.FULL, "attention"))
    return [
        state_space.mixer(f"{base.layer_prefix(index)}.mamba") if is_recurrent else attention(index)
        for index, is_recurrent in enumerate(kinds)
    ]


def _read_rope(fields: Fields, sizes: base.Sizes) -> RopeSpec | None:
    """None = positions are not encoded, as in all published files with recurrent layers."""
    rope = sizes.rope(fields)
    return rope if fields.text("position_embedding_type") == _ROPE else None


FAMILY = base.Family(_read_model)  # found by `registry`
