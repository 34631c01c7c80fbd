"""Olmo3ForCausalLM: reads Olmo 3's `config.json` into a `ModelSpec`: as `olmo2`, with a window on three of four layers;
only the others scale their rotary embedding.
"""

from dataclasses import replace

from tandem.architecture.families import base, olmo2
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec, read_rope, scaling_of_full_layers

_THETA = 500_000.0
_DEFAULTS = replace(olmo2.DEFAULTS, theta=_THETA)
_DEFAULT_WINDOW, _PATTERN = 4096, 4


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    types = read_types(fields, sizes.num_layers, _PATTERN)
    windows = read_windows(fields, types, _DEFAULT_WINDOW)
    bias, ropes = fields.flag("attention_bias", False), _read_ropes(fields, sizes)
    layers = [
        olmo2.layer(sizes, index, ropes[kind], bias=bias, window=window)
        for index, (kind, window) in enumerate(zip(types, windows, strict=True))
    ]
    model = base.build_model("olmo3", fields, sizes, layers)
    base.check_unread(fields)
    return model


def _read_ropes(fields: Fields, sizes: base.Sizes) -> dict[str, RopeSpec]:
    """Reads `rope_parameters` by layer type; in older files `rope_theta`, and `rope_scaling` of the full layers."""
    nested, scaling = fields.section("rope_parameters"), scaling_of_full_layers(fields)
    theta = fields.number("rope_theta", _THETA)
    full = nested.section(base.FULL) if nested is not None else None
    sliding = nested.section(base.SLIDING) if nested is not None else None
    if nested is not None:
        nested.refuse_unread()
    if scaling is not None and full is not None:
        raise fields.unsupported("rope_scaling", "either rope_parameters or rope_scaling")

    def rope(parameters: Fields | None, default_theta: float) -> RopeSpec:
        return read_rope(
            fields,
            parameters,
            head_dim=sizes.head_dim,
            max_positions=sizes.max_positions,
            default_theta=default_theta,
            is_one_of_several=True,
        )

    return {base.FULL: rope(scaling or full, theta), base.SLIDING: rope(sliding, _THETA)}


FAMILY = base.Family(_read_model)  # found by `registry`
