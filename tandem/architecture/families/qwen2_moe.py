"""Qwen2MoeForCausalLM: reads the `config.json` of Qwen 2's mixtures of experts into a `ModelSpec`: attention as in
`qwen2`; experts, and a shared block whose output has its own gate.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.qwen3_moe import read_blocks
from tandem.architecture.families.windows import read_optional_windows
from tandem.architecture.feed_forward import FeedForwardSpec, MixtureOfExpertsSpec
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=32768, kv_heads=16, hidden=2048, intermediate=5632, layers=24, heads=16, vocab=151_936
)
_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


def _read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Reads the window of each layer: from `layer_types` if given, else of every other layer below `max_window_layers`.
    There is none without `use_sliding_window`.
    """
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW, low=0)
    highest = fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return read_optional_windows(fields, num_layers, window, lambda index: index % 2 == 0 and index < highest)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    windows, rope, bias = _read_windows(fields, sizes.num_layers), sizes.rope(fields), fields.flag("qkv_bias", True)
    width = fields.count("shared_expert_intermediate_size", 5632, high=1 << 20)
    blocks = read_blocks(fields, sizes, num_experts=60, top_k=4, width=1408)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope, window=window, qkv_bias=bias),
            with_shared(sizes, index, block, width),
        )
        for index, (window, block) in enumerate(zip(windows, blocks, strict=True))
    ]
    model = base.build_model("qwen2_moe", fields, sizes, layers)
    base.check_unread(fields, TRAINING_KEYS)
    return model


def with_shared(
    sizes: base.Sizes, index: int, block: MixtureOfExpertsSpec | None, width: int
) -> FeedForwardSpec | None:
    """`block` of layer `index` with a shared block of inner size `width` added, if it has experts."""
    if block is None:
        return None
    prefix = f"{base.layer_prefix(index)}.mlp"
    return replace(
        block,
        shared=base.gated(sizes, f"{prefix}.shared_expert", width),
        shared_gate=LinearSpec(f"{prefix}.shared_expert_gate", 1, sizes.hidden),
    )


FAMILY = base.Family(_read_model)  # found by `registry`
