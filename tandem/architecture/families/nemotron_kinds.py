"""Reads the kinds of a Nemotron-H checkpoint's layers, from a list of names or a pattern of letters."""

from typing import Final

from tandem.architecture.families import base
from tandem.architecture.fields import Fields

_LINEAR = "linear_attention"
MIXERS: Final = (_LINEAR, base.FULL)  # the kinds of layers that combine tokens: recurrences and attention
_KINDS = {"M": _LINEAR, "E": "moe", "*": base.FULL, "-": "mlp"}  # by their letters in a pattern
_OLD_NAMES = {"mamba": _LINEAR, "attention": base.FULL}


def read_kinds(fields: Fields) -> tuple[str, ...]:
    """Kind of each layer of the checkpoint: one of `MIXERS`, "moe" or "mlp"."""
    name = "layers_block_type" if fields.texts("layers_block_type") else "layer_types"
    kinds = fields.texts(name)
    if kinds is None and (pattern := fields.text("hybrid_override_pattern")) is not None:
        name, kinds = "hybrid_override_pattern", tuple(_KINDS.get(letter, letter) for letter in pattern)
    kinds = tuple(_OLD_NAMES.get(kind, kind) for kind in kinds or _KINDS.values())
    if not {*kinds} <= {*_KINDS.values()}:
        raise fields.unsupported(name, ", ".join(f"{kind} ({letter})" for letter, kind in _KINDS.items()))
    if fields.optional_count("num_hidden_layers", high=1 << 10) not in (None, len(kinds)):
        raise fields.wrong("num_hidden_layers", f"{len(kinds)}, as many as {name} has")
    follows = zip(("mlp", *kinds), kinds, strict=False)
    if any(before not in MIXERS and kind not in MIXERS for before, kind in follows):
        raise fields.unsupported(name, "layers in which each mlp or moe follows one that mixes tokens")
    return kinds
