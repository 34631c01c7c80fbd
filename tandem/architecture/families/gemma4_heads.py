"""Reads head counts and sizes of Gemma 4's layers, which differ between global and sliding layers."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.fields import Fields

_GLOBAL_HEAD_DIM = 512


def read_heads(fields: Fields, sizes: base.Sizes, types: Sequence[str], is_value_key: bool) -> list[base.Sizes]:
    """Reads the heads of each layer, from `per_layer_config` (of newer files) or from the keys of global layers."""
    if fields.has("per_layer_config"):
        given = fields.section("per_layer_config") or Fields({}, fields.where)
        found = [_override(given.section(str(index)), sizes) for index in range(len(types))]
        given.refuse_unread()
        return found
    kv_heads = fields.optional_count("num_global_key_value_heads", high=1 << 12)
    wide = replace(
        sizes,
        head_dim=fields.count("global_head_dim", _GLOBAL_HEAD_DIM, low=2, high=1 << 12),
        num_kv_heads=kv_heads if is_value_key and kv_heads is not None else sizes.num_kv_heads,
    )
    if wide.head_dim % 2:
        raise fields.wrong("global_head_dim", "even, because rotary embedding turns pairs")
    if sizes.num_heads % wide.num_kv_heads:
        raise fields.wrong("num_global_key_value_heads", f"a divisor of num_attention_heads={sizes.num_heads}")
    return [wide if kind == base.FULL else sizes for kind in types]


def _override(section: Fields | None, sizes: base.Sizes) -> base.Sizes:
    if section is None:
        return sizes
    kv_heads = section.count("num_key_value_heads", sizes.num_kv_heads, high=1 << 12)
    head_dim = section.count("head_dim", sizes.head_dim, low=2, high=1 << 12)
    section.refuse_unread()
    if sizes.num_heads % kv_heads:
        raise section.wrong("num_key_value_heads", f"a divisor of num_attention_heads={sizes.num_heads}")
    if head_dim % 2:
        raise section.wrong("head_dim", "even, because rotary embedding turns pairs")
    return replace(sizes, num_kv_heads=kv_heads, head_dim=head_dim)
