"""Header of a safetensors file whose tensors are then written one after another, without keeping them in memory."""

import json
from collections.abc import Iterable, Mapping

_ALIGNMENT = 4096


HeaderEntry = tuple[str, tuple[int, ...], str, int]
"""Name, shape, safetensors' name of the dtype, and bytes of a tensor."""


def safetensors_header(tensors: Iterable[HeaderEntry], metadata: Mapping[str, str], least_bytes: int = 0) -> bytes:
    """The header, padded so that the first tensor begins at a page.

    Args:
        tensors: name, shape, dtype and bytes of each tensor, in the order in which they follow.
        least_bytes: minimum size of the header, a multiple of a page.
    """
    offset = 0
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, shape, dtype, num_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries).encode()
    text = text.ljust(least_bytes - 8)
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
