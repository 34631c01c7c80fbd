"""Sliding windows among full-attention layers: the layers that have one, and its length."""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields


def read_types(fields: Fields, num_layers: int, pattern: int) -> tuple[str, ...]:
    """`layer_types`; when absent, every `pattern`-th layer is full and the others are sliding."""
    types = base.read_layer_types(fields, num_layers)
    if types is None:
        return tuple(base.SLIDING if (i + 1) % pattern else base.FULL for i in range(num_layers))
    return types


def read_windows(fields: Fields, types: tuple[str, ...], default: int) -> list[int | None]:
    """Window of each layer of `types`: `sliding_window` tokens if it is sliding, else None.

    Raises:
        CorruptCheckpointError: layers are sliding and there is no window.
    """
    window = fields.optional_count("sliding_window", default)
    if window is None and base.SLIDING in types:
        raise fields.wrong("sliding_window", "a positive integer where layers are sliding")
    return [window if kind == base.SLIDING else None for kind in types]
