"""Reads the rotary embeddings of Gemma 3: one for local layers and one, scaled, for global ones."""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.rope import RopeSpec, read_rope, scaling_of_full_layers

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def read_ropes(fields: Fields, sizes: base.Sizes) -> dict[str, RopeSpec]:
    """Reads the embedding of each kind of layer. Newer files nest `rope_parameters` by layer type; older ones have
    `rope_theta` and `rope_scaling` for the global layers and `rope_local_base_freq` for the local ones.
    """
    nested, scaling = fields.section("rope_parameters"), scaling_of_full_layers(fields)
    if nested is not None and scaling is not None:
        raise fields.unsupported("rope_scaling", "either rope_parameters or rope_scaling")
    sections = {
        base.FULL: nested.section(base.FULL) if nested else scaling,
        base.SLIDING: nested.section(base.SLIDING) if nested else None,
    }
    if nested is not None:
        nested.refuse_unread()
    thetas = {
        base.FULL: fields.number("rope_theta", _GLOBAL_THETA),
        base.SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
    }
    return {
        kind: read_rope(
            fields,
            sections[kind],
            head_dim=sizes.head_dim,
            max_positions=sizes.max_positions,
            default_theta=thetas[kind],
            is_one_of_several=True,
        )
        for kind in sections
    }
