"""A GGUF file, or all files of a split model: metadata, table of tensors, and the tensors' bytes.

Invariant: every length and offset is checked against the file before it is used, so nothing outside it is read. Knows
no architecture and decodes no weights. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.parts import part_paths
from tandem.models.gguf.source import GgufSource, MappedFile, OpenSource

MAGIC = b"GGUF"
SERVED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"),
)
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_LEAST_ENTRY_BYTES = 12  # of metadata or of the table of tensors
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_AGAIN = "download all parts again"

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Row of the table of tensors. `shape`: rows first, as in PyTorch; `type_name`: such as Q4_0; `part`: index of the
    file of a split model; `offset`: bytes from the beginning of that file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int
    part: int


class GgufFile:
    """An open GGUF file, a context manager that closes it. Metadata are those of the first file of a split model.

    Args:
        path: path of the file, or of any file of a split model.
        open_source: opens the file of a given name.

    Raises:
        CorruptCheckpointError: it is truncated, lengths and offsets contradict each other, or a file of a split model
            is missing or belongs to another model.
        UnsupportedCheckpointError: a version or a type of tensor that is not supported.
    """

    def __init__(self, path: Path, open_source: OpenSource = MappedFile) -> None:
        paths = part_paths(path)
        self.path = paths[0]
        with ExitStack() as opened:
            self._parts = [opened.enter_context(_Part(each, index, open_source)) for index, each in enumerate(paths)]
            self.metadata = self._parts[0].metadata
            self.tensors = self._joined()
            self._opened = opened.pop_all()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def rows(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """A copy of the tensor's bytes, as stored. # [first dimension, bytes of a row]

        Raises:
            CorruptCheckpointError: the file has become shorter.
        """
        return self._parts[entry.part].read(entry).reshape(entry.shape[0] if _is_divisible(entry) else 1, -1)

    def entries_of(self, stack: TensorEntry) -> list[TensorEntry]:
        """The tensors of a stack, whose first dimension numbers them.

        Raises:
            CorruptCheckpointError: it is no stack.
        """
        count, shape = stack.shape[0], stack.shape[1:]
        if not shape:
            raise CorruptCheckpointError(f"{self.path}: tensor {stack.name!r} is a vector and no stack of tensors")
        num_bytes = stack.num_bytes // count
        return [
            replace(stack, shape=shape, offset=stack.offset + index * num_bytes, num_bytes=num_bytes)
            for index in range(count)
        ]

    def _joined(self) -> Mapping[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        for part in self._parts:
            part.require(len(self._parts))
            twice = tensors.keys() & part.tensors.keys()
            if twice:
                raise CorruptCheckpointError(f"{part.path}: tensor {min(twice)!r} is in another part too; {_AGAIN}")
            tensors |= part.tensors
        total = self.metadata.get("split.tensors.count", len(tensors))
        if len(self._parts) > 1 and total != len(tensors):
            raise CorruptCheckpointError(
                f"{self.path}: split.tensors.count={total!r}, and its {len(self._parts)} parts have {len(tensors)} "
                f"tensors; {_AGAIN}"
            )
        return tensors


class _Part:
    """One file of a GGUF model; a context manager."""

    def __init__(self, path: Path, index: int, open_source: OpenSource) -> None:
        self.path, self._index = path, index
        with ExitStack() as opened:
            self._source = open_source(path)
            opened.callback(self._source.close)
            self.metadata, self.tensors = self._read_header()
            self._opened = opened.pop_all()

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def require(self, num_parts: int) -> None:
        """Raises CorruptCheckpointError if its metadata name another index or number of files than its name."""
        declared = self.metadata.get("split.count", 0) or 1, self.metadata.get("split.no", 0)
        if declared != (num_parts, self._index):
            raise CorruptCheckpointError(
                f"{self.path}: split.count={declared[0]!r} and split.no={declared[1]!r} (from 0), and by its name it "
                f"is part {self._index + 1} of {num_parts}; download all parts again and keep their names"
            )

    def read(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """A copy of the tensor's bytes. # [num_bytes]"""
        return self._source.read(entry.offset, entry.num_bytes, f"tensor {entry.name!r}")

    def _read_header(self) -> tuple[Mapping[str, Value], Mapping[str, TensorEntry]]:
        reader = _Reader(self._source, self.path)
        num_tensors, num_values = self._read_counts(reader)
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = reader.string("a metadata key")
            metadata[key] = reader.value(reader.number("I"), key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise reader.corrupt(f"general.alignment={alignment!r} is no power of two")
        entries = [self._read_entry(reader) for _ in range(num_tensors)]
        start = -(-reader.position // alignment) * alignment
        return metadata, dict(self._place(entries, start, reader))

    def _read_counts(self, reader: "_Reader") -> tuple[int, int]:
        magic = reader.take(len(MAGIC), "the magic bytes")
        if magic != MAGIC:
            raise reader.corrupt(f"begins with {magic!r} and not with {MAGIC!r}, so it is no GGUF file, or damaged")
        version = reader.number("I")
        if version not in _VERSIONS:
            big_endian = " (it is big-endian)" if version in {number << 24 for number in _VERSIONS} else ""
            raise UnsupportedCheckpointError(
                f"{self.path} is of GGUF version {version}{big_endian}; little-endian 2 and 3 are read: convert it anew"
            )
        counts = reader.number("Q"), reader.number("Q")
        for count, noun in zip(counts, ("tensors", "metadata values"), strict=True):
            if count * _LEAST_ENTRY_BYTES > reader.remaining:
                size = len(self._source)
                raise reader.corrupt(f"promises {count} {noun}, more than its {size} bytes can hold: it is damaged")
        return counts

    def _read_entry(self, reader: "_Reader") -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and offset in the file's section of tensors."""
        name = reader.string("a tensor's name")
        num_dimensions = reader.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise reader.corrupt(
                f"tensor {name!r} has {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are possible"
            )
        shape = tuple(reversed([reader.number("Q") for _ in range(num_dimensions)]))
        return name, shape, reader.number("I"), reader.number("Q")

    def _place(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, reader: "_Reader"
    ) -> Iterator[tuple[str, TensorEntry]]:
        seen: set[str] = set()
        for name, shape, number, offset in entries:
            if name in seen:
                raise reader.corrupt(f"has two tensors {name!r}")
            seen.add(name)
            type_name, num_bytes = self._size(name, shape, number)
            if start + offset + num_bytes > len(self._source):
                raise reader.corrupt(
                    f"tensor {name!r} ends at byte {start + offset + num_bytes} of {len(self._source)}: the file is "
                    "truncated or damaged"
                )
            yield name, TensorEntry(name, shape, type_name, start + offset, num_bytes, self._index)

    def _size(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """The type's name, and the number of bytes of the tensor."""
        known = {kind.value: kind for kind in GGMLQuantizationType}
        type_name = known[number].name if number in known else f"number {number}"
        if type_name not in SERVED_TYPES:
            raise UnsupportedCheckpointError(
                f"{self.path}: tensor {name!r} is of type {type_name}, which is not served; "
                f"supported: {', '.join(SERVED_TYPES)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[known[number]]
        if not prod(shape) or shape[-1] % block:
            raise CorruptCheckpointError(
                f"{self.path}: tensor {name!r} has the shape {list(shape)}, whose rows are not made of {type_name}'s "
                f"blocks of {block}"
            )
        return type_name, prod(shape) // block * block_bytes


def _is_divisible(entry: TensorEntry) -> bool:
    """Whether its bytes can be cut along the first dimension: not if a quantised block of a vector would be cut."""
    return len(entry.shape) > 1 or entry.type_name in ("F32", "F16", "BF16")


class _Reader:
    """Position in a file's header, from which values are read one after another."""

    def __init__(self, source: GgufSource, path: Path) -> None:
        self._source, self._path = source, path
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self._source) - self.position

    def take(self, num_bytes: int, noun: str) -> bytes:
        if num_bytes > self.remaining:
            raise self.corrupt(
                f"ends at byte {len(self._source)}, within {noun} of {num_bytes} bytes: it is truncated or damaged"
            )
        self.position += num_bytes
        return self._source.header(self.position - num_bytes, self.position)

    def number(self, code: str) -> int:
        """An integer, by its format character in `struct`."""
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), "a number"))[0])

    def string(self, noun: str) -> str:
        text = self.take(self.number("Q"), noun)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{noun} is not UTF-8: {error}") from error

    def value(self, kind: int, key: str) -> Value:
        """A metadata value of GGUF's type number `kind`."""
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self._scalars(kind, 1, key)[0]
        if kind != _ARRAY:
            raise self.corrupt(f"{key} has the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            if count * 8 > self.remaining:
                raise self.corrupt(f"{key} promises {count} strings, more than the file can hold")
            return [self.string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.corrupt(f"{key} is an array of the unknown type {kind}")
        return self._scalars(kind, count, key)

    def corrupt(self, problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path}: {problem}; {self._source.remedy}")

    def _scalars(self, kind: int, count: int, key: str) -> list[int] | list[float]:
        code = f"<{_SCALARS[kind]}"
        stored = self.take(count * struct.calcsize(code), key)
        return [value for (value,) in struct.iter_unpack(code, stored)]
