"""Reads the attention of Gemma 4: layers that share K and V, values equal to keys, rotary embeddings by type of layer.

The last `num_kv_shared_layers` layers read the K and V of the last layer of their kind before them. With
`attention_k_eq_v`, global layers have no `v_proj`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.families.gemma4_heads import read_heads
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.rope import DEFAULT_THETA, RopeSpec, read_rope

_DEFAULT_WINDOW, _PATTERN = 512, 6
_DEFAULT_ROPES: Final[Mapping[str, Mapping[str, object]]] = {
    base.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    base.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read_mixers(fields: Fields, sizes: base.Sizes) -> list[AttentionSpec]:
    """Reads the mixer of each layer."""
    fields.only("use_bidirectional_attention", ("vision",), "absent, or vision, which changes nothing for text")
    types = (*read_types(fields, sizes.num_layers, _PATTERN)[:-1], base.FULL)  # NOTE: whatever the file says
    windows = read_windows(fields, types, _DEFAULT_WINDOW)
    is_value_key, bias = fields.flag("attention_k_eq_v", False), fields.flag("attention_bias", False)
    heads = read_heads(fields, sizes, types, is_value_key)
    sources = _read_sources(fields, types, heads)

    def mixer(index: int, kind: str) -> AttentionSpec:
        plain = base.attention(
            heads[index],
            index,
            _read_rope(fields, heads[index], kind),
            window=windows[index],
            scale=1.0,
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
        )
        if sources[index] is not None:
            return replace(plain, k=None, v=None, k_norm=None, reads_state_of=sources[index])
        v_norm = sizes.norm(f"{base.layer_prefix(index)}.self_attn.v_norm", plain.head_dim)
        value = None if is_value_key and kind == base.FULL else plain.v
        return replace(plain, v=value, v_norm=replace(v_norm, weight=None))

    return [mixer(index, kind) for index, kind in enumerate(types)]


def _read_sources(fields: Fields, types: Sequence[str], heads: Sequence[base.Sizes]) -> list[int | None]:
    """Index of the layer whose K and V each layer reads; None = its own."""
    num_own = len(types) - fields.count("num_kv_shared_layers", 0, low=0, high=len(types) - 1)
    last_of = {kind: index for index, kind in enumerate(types[:num_own])}
    for index in range(num_own, len(types)):
        source = last_of.get(types[index])
        if source is None or heads[source] != heads[index]:
            accepted = f"fewer, so that a {types[index]} layer with the heads of layer {index} keeps its K and V"
            raise fields.wrong("num_kv_shared_layers", accepted)
    return [None if index < num_own else last_of[kind] for index, kind in enumerate(types)]


def _read_rope(fields: Fields, sizes: base.Sizes, kind: str) -> RopeSpec:
    nested = fields.section("rope_parameters") or Fields(_DEFAULT_ROPES, fields.where)
    parameters = nested.section(kind)
    if parameters is None:
        raise nested.wrong(kind, "an object, because there are such layers")
    nested.refuse_unread((base.FULL, base.SLIDING))
    is_proportional = parameters.text("rope_type") == "proportional"
    return read_rope(
        fields,
        parameters,
        head_dim=sizes.head_dim,
        max_positions=sizes.max_positions,
        default_theta=fields.number("rope_theta", DEFAULT_THETA),
        served_shares=None if is_proportional else (1.0,),
        is_one_of_several=True,
    )
