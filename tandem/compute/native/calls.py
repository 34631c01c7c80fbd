"""Calls of compiled functions, each with a struct of its arguments (`src/calls.h`). Imports no PyTorch."""

import ctypes
import struct
from collections.abc import Callable


def struct_of(fields: str) -> struct.Struct:
    """A C++ struct whose fields have these names, in their order; all take 8 bytes.

    A name is of an integer or pointer, or, followed by `:d`, of a double. Tests compare names and kinds with `src`.
    """
    return struct.Struct("=" + "".join("d" if name.endswith(":d") else "q" for name in fields.split()))


def bind(library: ctypes.CDLL, name: str, fields: str) -> Callable[..., None]:
    """The kernel as a function of its argument struct's fields, which `struct_of` explains."""
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_char_p]
    pack = struct_of(fields).pack
    return lambda *values: function(pack(*values))
