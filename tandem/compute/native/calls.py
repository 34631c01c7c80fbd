"""Calls of compiled functions, each with one struct of its arguments (`src/calls.h`). Imports no PyTorch."""

import ctypes
import struct
from collections.abc import Callable


def struct_of(fields: str) -> struct.Struct:
    """The C++ struct whose fields have these names, in their order; each takes 8 bytes.

    A name stands for an integer or a pointer, or with the suffix `:d` for a double. Tests compare names and kinds with
    `src`.
    """
    return struct.Struct("=" + "".join("d" if name.endswith(":d") else "q" for name in fields.split()))


def bind(library: ctypes.CDLL, name: str, fields: str) -> Callable[..., None]:
    """The compiled function `name` as a Python function of its struct's fields, which are given as in `struct_of`."""
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_char_p]
    pack = struct_of(fields).pack
    return lambda *values: function(pack(*values))
