"""Qwen3NextForCausalLM: reads Qwen3-Next's `config.json` into a `ModelSpec`: gated DeltaNet and gated attention
(`delta_rule`); experts, and a shared block with its own gate.

The maps of a DeltaNet layer are stored group by group: rows of q, k, v and the gate of one group, then of the next.
"""

from tandem.architecture.families import base
from tandem.architecture.families.delta_net import DeltaNetMaps, DeltaNetSizes
from tandem.architecture.families.delta_rule import build_model_with_mtp, read_mixers
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.qwen2_moe import with_shared
from tandem.architecture.families.qwen3_moe import read_blocks
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, Source

_DEFAULTS = base.Defaults(
    max_positions=32768,
    kv_heads=2,
    head_dim=256,
    rotary_share=0.25,
    hidden=2048,
    intermediate=5632,
    layers=48,
    heads=16,
    vocab=151_936,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True)
    mixers = read_mixers(fields, sizes, sizes.rope(fields), _read_maps)
    blocks = read_blocks(fields, sizes, num_experts=512, top_k=10, width=512, renormalise=True)
    width = fields.count("shared_expert_intermediate_size", 512, high=1 << 20)
    layers = [
        base.pre_norm_layer(sizes, index, mixer, with_shared(sizes, index, block, width))
        for index, (mixer, block) in enumerate(zip(mixers, blocks, strict=True))
    ]
    model = build_model_with_mtp("qwen3_next", fields, sizes, layers)
    base.check_unread(fields, TRAINING_KEYS)
    return model


def _read_maps(sizes: DeltaNetSizes, prefix: str) -> DeltaNetMaps:
    per_group = sizes.num_heads // sizes.num_groups
    key, value = sizes.key_dim, per_group * sizes.value_dim
    q, k, v, gate = _parts(sizes, prefix, "in_proj_qkvz", {"q": key, "k": key, "v": value, "gate": value})
    b, a = _parts(sizes, prefix, "in_proj_ba", {"b": per_group, "a": per_group})
    return DeltaNetMaps(qkv=(q, k, v), gate=gate, a=a, b=b)


def _parts(sizes: DeltaNetSizes, prefix: str, name: str, rows: dict[str, int]) -> list[LinearSpec]:
    """The maps that share a tensor. `rows`: number of rows of each map in a group."""
    found, start, period = list[LinearSpec](), 0, sum(rows.values())
    for part, count in rows.items():
        source = Source(f"{prefix}.{name}.weight", start=start, stop=start + count, period=period)
        outputs = sizes.num_groups * count
        found.append(LinearSpec(f"{prefix}.{part}", outputs, sizes.hidden, weight_source=source))
        start += count
    return found


FAMILY = base.Family(_read_model)  # found by `registry`
