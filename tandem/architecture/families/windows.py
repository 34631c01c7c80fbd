"""Reads the sliding windows of models that mix sliding and full attention: the layers with a window, and its length."""

from collections.abc import Callable

from tandem.architecture.families import base
from tandem.architecture.fields import Fields


def read_types(fields: Fields, num_layers: int, pattern: int) -> tuple[str, ...]:
    """Kind of each layer, from `layer_types`; when absent, every `pattern`-th is full and the others are sliding."""
    types = base.read_layer_types(fields, num_layers)
    if types is None:
        return tuple(base.SLIDING if (i + 1) % pattern else base.FULL for i in range(num_layers))
    return types


def read_windows(fields: Fields, types: tuple[str, ...], default: int) -> list[int | None]:
    """Window of each layer in `types`: `sliding_window` tokens if it is sliding, else None.

    Raises:
        CorruptCheckpointError: layers are sliding and there is no window.
    """
    window = fields.optional_count("sliding_window", default)
    if window is None and base.SLIDING in types:
        raise fields.wrong("sliding_window", "a positive integer where layers are sliding")
    return [window if kind == base.SLIDING else None for kind in types]


def read_optional_windows(
    fields: Fields, num_layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Window of each layer: `window` tokens in the sliding layers of `layer_types`, or if absent where `slides` is
    true. There is none without `use_sliding_window`, or if `window` is 0.
    """
    types = base.read_layer_types(fields, num_layers)
    if not fields.flag("use_sliding_window", False):
        window = None
    if types is None:
        types = tuple(base.SLIDING if window and slides(index) else base.FULL for index in range(num_layers))
    if not window and base.SLIDING in types:
        raise fields.wrong("layer_types", f"{base.FULL} throughout, because no sliding window is in use")
    return tuple(window if kind == base.SLIDING else None for kind in types)
