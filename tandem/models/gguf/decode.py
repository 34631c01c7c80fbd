"""Decoding of GGUF rows to float32, and rounding of float32 to the stored floats; the package `gguf` has the
arithmetic.

Infinite values and NaN, before or after rounding, are refused and never stored.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.file import TensorEntry

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # names in safetensors
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # GGUF types that are not quantised
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one number
_CHUNK_BYTES = 16 << 20  # of quantised rows that are decoded at once
_EXPONENT = 0x7F80  # of bfloat16: all bits set means infinite or NaN


def decoded(rows: NDArray[np.uint8], type_name: str, dtype: str, where: str) -> Iterator[bytes]:
    """The rows as `dtype`, little-endian, in pieces.

    Args:
        rows: [num_rows, bytes of a row], as stored.
        where: name of the tensor in messages.

    Raises:
        CorruptCheckpointError: a value is not finite, for example because a block's scale is damaged.
    """
    step = max(1, _CHUNK_BYTES // rows.shape[1])
    for start in range(0, len(rows), step):
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(rows[start : start + step], GGMLQuantizationType[type_name])
            stored = _rounded(values, dtype)
        finite = np.isfinite(values) & _is_finite(stored)
        if not finite.all():
            row = start + int(np.argmin(finite.all(axis=1)))
            raise CorruptCheckpointError(
                f"{where}: row {row} has values that are infinite, no numbers, or too large for {dtype}: a scale of "
                f"its {type_name} blocks is damaged; download the file again"
            )
        yield stored.tobytes()


def changed(
    sources: Sequence[tuple[NDArray[np.uint8], TensorEntry]], change: Callable[..., NDArray[np.float32]]
) -> NDArray[np.uint8]:
    """float32 rows of the result of `change`, which is called with the numbers of the tensors in their shapes.

    Args:
        sources: the stored rows of each tensor, and its entry in the file's table.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        values = [_shaped(rows, entry) for rows, entry in sources]
        found = np.ascontiguousarray(change(*values), np.float32)
    return found.view(np.uint8).reshape(len(found), -1)


def _shaped(rows: NDArray[np.uint8], entry: TensorEntry) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[entry.type_name])
    return values.reshape(-1 if len(entry.shape) == 1 else len(rows), *entry.shape[1:])


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Rounds to the nearest, ties to even. bfloat16 is returned as its bits, since NumPy has no such type."""
    if dtype != "bfloat16":
        return values.astype(np.float32 if dtype == "float32" else np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


def _is_finite(stored: NDArray[np.generic]) -> NDArray[np.bool_]:
    if stored.dtype == np.uint16:
        exponents: NDArray[np.uint16] = stored.view(np.uint16) & np.uint16(_EXPONENT)
        return np.not_equal(exponents, np.uint16(_EXPONENT))
    return np.isfinite(stored.astype(np.float32, copy=False))
