"""The beginning of a safetensors file whose tensors are then written one after another, none kept in memory."""

import json
from collections.abc import Iterable, Mapping

_ALIGNMENT = 4096


def safetensors_header(
    tensors: Iterable[tuple[str, tuple[int, ...], int]], dtype: str, metadata: Mapping[str, str]
) -> bytes:
    """Padded, so that the first tensor begins at a page.

    Args:
        tensors: name, shape and bytes of each, in the order in which they follow.
        dtype: safetensors' name of what they all are.
    """
    offset = 0
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, shape, num_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
