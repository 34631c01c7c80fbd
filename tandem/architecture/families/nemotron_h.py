"""NemotronHForCausalLM: reads the `config.json` of Nemotron-H, Nemotron Nano 2 and Nemotron 3 into a `ModelSpec`.

A checkpoint's layer is either a mixer or a feed-forward block. The latter is combined with the mixer before it into one
`LayerSpec`, which computes the same.
"""

from dataclasses import replace

from tandem.architecture.families import backbone, base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.nemotron_blocks import read_blocks
from tandem.architecture.families.nemotron_kinds import MIXERS, read_kinds
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=4096,
    kv_heads=8,
    head_dim=128,
    eos_token_id=2,
    bos_token_id=1,
    activation_key="mamba_hidden_act",
    hidden=4096,
    intermediate=21_504,
    layers=4,
    heads=32,
    vocab=131_072,
)
_UNUSED_KEYS = (
    *("mamba_proj_bias", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    *("partial_rotary_factor", "rope_theta", "attention_head_dim", "num_nextn_predict_layers"),
)


def _read_model(file: Fields) -> ModelSpec:
    fields = file.renamed(backbone.OTHER_NAMES)
    fields.only("mamba_hidden_act", ("silu", "swish"), "silu")
    kinds = read_kinds(fields)
    read = base.read_sizes(fields, replace(_DEFAULTS, layers=len(kinds)))
    sizes = replace(read, num_layers=len(kinds), eps=fields.number("layer_norm_epsilon", 1e-5, high=1.0))
    model = base.build_model("nemotron_h", fields, sizes, _read_layers(fields, sizes, kinds), unserved=("mtp.",))
    base.check_unread(fields, (*backbone.UNUSED_KEYS, *_UNUSED_KEYS, *TRAINING_KEYS))
    return model


def _read_layers(fields: Fields, sizes: base.Sizes, kinds: tuple[str, ...]) -> list[LayerSpec]:
    """One layer for each mixer, with the feed-forward block of the checkpoint's next layer if that is one."""
    names = ("mamba_num_heads", 128), ("mamba_head_dim", 64), ("ssm_state_size", 128)
    state_space = backbone.read_state_space(fields, sizes.hidden, sizes.eps, *names)
    blocks = read_blocks(fields, sizes)

    def mixer(index: int) -> MixerSpec:
        if kinds[index] == base.FULL:
            return base.attention(sizes, index, None)
        return state_space.mixer(f"{backbone.layer_prefix(index)}.mixer")

    def layer(index: int) -> LayerSpec:
        plain = LayerSpec(
            mixer=mixer(index),
            feed_forward=None,
            before_mixer=backbone.layer_norm(index, sizes.hidden, sizes.eps),
            before_feed_forward=None,
        )
        after = index + 1
        if after == len(kinds) or kinds[after] in MIXERS:
            return plain
        return replace(
            plain,
            feed_forward=blocks.block(f"{backbone.layer_prefix(after)}.mixer", kinds[after]),
            before_feed_forward=backbone.layer_norm(after, sizes.hidden, sizes.eps),
        )

    return [layer(index) for index, kind in enumerate(kinds) if kind in MIXERS]


FAMILY = base.Family(_read_model, backbone.parameter_name)  # found by `registry`
