"""Triton's interpreter with bfloat16 as GPUs have it and, on demand, sums in the order of their terms."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


@contextmanager
def products(*, ordered: bool = False) -> Iterator[None]:
    """bfloat16 as numbers: the interpreter would multiply its bit patterns as integers, and cut what it should round.

    Args:
        ordered: add each up in the order of its terms, as a GPU does whatever the tile. NOTE: the interpreter leaves
            products to NumPy's BLAS, which on some CPUs adds in another order for fewer rows.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="this triton has no interpreter")

    def dot(_: object, a: Any, b: Any, d: Any, *options: object) -> object:
        left, right = (_floats(each, d.data.dtype) for each in (a, b))
        if not ordered:
            return interpreter.TensorHandle(left @ right + d.data, d.dtype.scalar)
        total = d.data.copy()
        for term in range(left.shape[1]):
            total += left[:, term, None] * right[None, term]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def _floats(handle: Any, dtype: Any) -> Any:
    if handle.dtype.scalar.name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(dtype)
    return handle.data.astype(dtype)
