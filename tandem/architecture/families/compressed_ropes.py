"""Reads the rotary embeddings of DeepSeek-V4: one for sliding layers and one, scaled, for the others."""

from collections.abc import Mapping
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.compressed_kinds import ALL, CHOSEN
from tandem.architecture.fields import Fields
from tandem.architecture.rope import RopeSpec, read_rope

_MAIN, _COMPRESSED = "main", "compress"
_THETAS = {_MAIN: ("rope_theta", 10_000.0), _COMPRESSED: ("compress_rope_theta", 160_000.0)}
_ROTATED_SHARE = 64 / 512


def read_ropes(fields: Fields, sizes: base.Sizes) -> Mapping[str, RopeSpec]:
    """Reads the rotary embedding of each kind of layer. Newer files describe one for sliding layers and one for the
    others; older ones only the scaling of the latter, with a factor of cosines and sines only if the file gives one.
    """
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    described = scaling or parameters  # NOTE: as in transformers
    thetas = {name: fields.number(key, theta) for name, (key, theta) in _THETAS.items()}
    rotary_dim = fields.optional_count("qk_rope_head_dim", high=sizes.head_dim)
    share, shares = _ROTATED_SHARE if rotary_dim is None else rotary_dim / sizes.head_dim, None
    nested = None if described is None else _read_nested(described)
    if nested is None:
        shares = (fields.number("partial_rotary_factor", share),)  # NOTE: as in transformers, of both kinds of layer
    else:
        thetas[_COMPRESSED] = thetas[_MAIN]  # NOTE: as in transformers, where an object has none
    ropes = {
        name: read_rope(
            fields,
            section,
            head_dim=sizes.head_dim,
            max_positions=sizes.max_positions,
            default_theta=thetas[name],
            default_share=share,
            served_shares=shares,
            is_one_of_several=True,
        )
        for name, section in (nested or {_MAIN: None, _COMPRESSED: described}).items()
    }
    compressed = ropes[_COMPRESSED]
    if nested is None and described is not None:
        factor = described.number("attention_factor", 1.0)
        compressed = replace(compressed, theta=thetas[_COMPRESSED], attention_factor=factor)
    return {base.SLIDING: ropes[_MAIN], CHOSEN: compressed, ALL: compressed}


def _read_nested(described: Fields) -> Mapping[str, Fields | None] | None:
    """The objects of both kinds of layer; None if `described` is of one kind alone."""
    if not any(described.has(name) for name in _THETAS):
        return None
    for name in _THETAS:
        if described.get(name) is None:
            raise described.wrong(name, "an object, as the other kind of layer has one")
    sections = {name: described.section(name) for name in _THETAS}
    described.refuse_unread()
    return sections
