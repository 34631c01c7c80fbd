"""Phi3ForCausalLM: reads the `config.json` of Phi 3, 3.5 and 4 into a `ModelSpec`: as `llama`, but q, k and v are rows
of one tensor, and so are gate and up.
"""

from collections.abc import Iterable
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.feed_forward import GatedSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, Source

_DEFAULTS = base.Defaults(
    max_positions=4096,
    eos_token_id=32000,
    bos_token_id=1,
    eps=1e-5,
    rotary_share=1.0,
    hidden=3072,
    intermediate=8192,
    layers=32,
    heads=32,
    vocab=32064,
)
DROPOUT_KEYS = ("embd_pdrop", "resid_pdrop")  # only matter in training
_PLAIN_KEYS = ("full_attn_mod", "interpolate_factor")  # 1 in all published files; no code is known that reads them


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    window, rope = fields.optional_count("sliding_window"), sizes.rope(fields)
    _check_original_length(fields)
    for name in _PLAIN_KEYS:
        fields.only(name, (1,), "1")
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            _fused_attention(
                base.attention(sizes, index, rope, window=window), f"{base.layer_prefix(index)}.self_attn"
            ),
            _fused_block(base.gated(sizes, f"{base.layer_prefix(index)}.mlp"), f"{base.layer_prefix(index)}.mlp"),
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("phi3", fields, sizes, layers)
    base.check_unread(fields, DROPOUT_KEYS)
    return model


def _check_original_length(fields: Fields) -> None:
    """Refuses a length inside the rope's description alone: transformers reads it outside, and else has 4,096."""
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    if rope is not None and fields.get("original_max_position_embeddings") is None:
        rope.only("original_max_position_embeddings", (4096,), "4096 unless the same key outside has another value")


def _fused_attention(mixer: AttentionSpec, prefix: str) -> AttentionSpec:
    q, k, v = fused(filter(None, (mixer.q, mixer.k, mixer.v)), f"{prefix}.qkv_proj.weight")
    return replace(mixer, q=q, k=k, v=v)


def _fused_block(block: GatedSpec, prefix: str) -> GatedSpec:
    gate, up = fused((block.gate, block.up), f"{prefix}.gate_up_proj.weight")
    return replace(block, gate=gate, up=up)


def fused(linears: Iterable[LinearSpec], tensor: str) -> list[LinearSpec]:
    """These linear maps, with their weights in consecutive rows of `tensor`."""
    placed, start = [], 0
    for linear in linears:
        stop = start + linear.outputs
        placed.append(replace(linear, weight_source=Source(tensor, start=start, stop=stop)))
        start = stop
    return placed


FAMILY = base.Family(_read_model)  # found by `registry`
