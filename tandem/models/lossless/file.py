"""A safetensors file whose bfloat16 tensors are losslessly compressed; they are decompressed in threads when they
are read.

A tensor NAME of n numbers and any shape is stored as three tensors:

- `NAME.sign_mantissa`, U8 of NAME's shape: a number's seven bits of mantissa, then its sign as the lowest bit;
- `NAME.exponents`, U8: deflate streams (see `exponents`), one for each chunk of numbers, concatenated;
- `NAME.chunks`, U32 [ceil(n / chunk), 2]: bytes of each chunk's stream, and the CRC-32 of its exponents followed by its
  signs and mantissas.

All other tensors are stored as in any safetensors file. The header's metadata have `tandem_lossless`, the layout's
version, and `chunk`, the numbers in a chunk (131,072 in files written here). The file's name ends with
`.lossless.safetensors`, so that readers of plain checkpoints do not find it.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch

from tandem.compute.huge_pages import advise_huge_pages
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.lossless.exponents import Bytes, DamagedChunkError, decode
from tandem.models.weight_files import SafetensorsFile

ENDING: Final = ".lossless.safetensors"  # of the file's name
VERSION_KEY, VERSION, CHUNK_KEY = "tandem_lossless", "1", "chunk"
REST, STREAMS, TABLE = PARTS = (".sign_mantissa", ".exponents", ".chunks")
_MOST_THREADS = 16
_MOST_NUMBERS = 1 << 24  # of a chunk
_REMEDY = "download or convert it again"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LosslessFile:
    """A safetensors file with compressed bfloat16 tensors, as a `WeightFile`, in which its methods are described.
    Raises CorruptCheckpointError if parts, header and checksums do not agree, UnsupportedCheckpointError if the layout
    has another version.
    """

    is_mapped = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        self._chunk = self._read_chunk()
        stored = frozenset(self._file.names())
        self._compressed = frozenset(name[: -len(part)] for part in PARTS for name in stored if name.endswith(part))
        self._names = tuple(self._compressed | {name for name in stored if not name.endswith(PARTS)})
        for name in self._compressed:
            self._check_parts(name, stored)

    def names(self) -> tuple[str, ...]:
        return self._names

    def outline(self, name: str) -> torch.Tensor:
        if name not in self._compressed:
            return self._file.outline(name)
        return torch.empty(self._file.outline(name + REST).shape, dtype=torch.bfloat16, device="meta")

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        """The numbers of `outline`; decompresses all numbers from its first to its last."""
        if name not in self._compressed:
            return self._file.read(name, outline)
        start = int(outline.storage_offset())
        steps = zip(outline.size(), outline.stride(), strict=True)
        extent = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps) if outline.numel() else 0
        return self._decode(name, start, start + extent).as_strided(outline.size(), outline.stride())

    def close(self) -> None:
        self._file.close()

    def _decode(self, name: str, start: int, stop: int) -> torch.Tensor:
        """[stop - start] numbers of a tensor. The chunks that have them are decompressed in threads."""
        out = torch.empty(stop - start, dtype=torch.bfloat16)
        advise_huge_pages(out)
        words = out.view(torch.int16).numpy().view(np.uint16)
        rest: Bytes = self._file.tensor(name + REST).view(-1).numpy()
        streams: Bytes = self._file.tensor(name + STREAMS).numpy()
        table = self._file.tensor(name + TABLE).numpy()
        ends = np.cumsum(table[:, 0], dtype=np.int64)

        def decode_chunk(index: int) -> None:
            first = index * self._chunk
            stream = streams[ends[index] - table[index, 0] : ends[index]]
            try:
                numbers = decode(rest[first : first + self._chunk], stream, int(table[index, 1]))
            except DamagedChunkError as error:
                raise CorruptCheckpointError(
                    f"{self.path} is damaged: chunk {index} of {name} has {error}; {_REMEDY}"
                ) from error
            low, high = max(first, start), min(first + numbers.size, stop)
            words[low - start : high - start] = numbers[low - first : high - first]

        in_threads(decode_chunk, range(start // self._chunk, -(-stop // self._chunk)))
        return out

    def _read_chunk(self) -> int:
        metadata = self._file.metadata()
        version, chunk = metadata.get(VERSION_KEY), metadata.get(CHUNK_KEY, "")
        if version != VERSION:
            raise UnsupportedCheckpointError(
                f"{self.path}: {VERSION_KEY} is {version!r} in its metadata, {VERSION!r} is read; make it again by "
                "`tandem convert --lossless`, or use the version of Tandem that made it"
            )
        if not (chunk.isascii() and chunk.isdecimal() and 0 < int(chunk) <= _MOST_NUMBERS):
            raise CorruptCheckpointError(
                f"{self.path}: {CHUNK_KEY} is {chunk!r} in its metadata, 1 to {_MOST_NUMBERS} are possible; {_REMEDY}"
            )
        return int(chunk)

    def _check_parts(self, name: str, stored: frozenset[str]) -> None:
        missing = [name + part for part in PARTS if name + part not in stored]
        if missing or name in stored:
            problem = f"lacks {missing[0]}" if missing else "has the same as floats"
            raise CorruptCheckpointError(f"{self.path} has {name} in parts and {problem}; {_REMEDY}")
        rest, streams, table = (self._file.tensor(name + part) for part in PARTS)
        found = tuple(tensor.dtype for tensor in (rest, streams, table))
        expected = (torch.uint8, torch.uint8, torch.uint32)
        if found != expected:
            raise CorruptCheckpointError(
                f"{self.path}: the parts of {name} are stored as {found}, expected: {expected}; {_REMEDY}"
            )
        shape = (-(-rest.numel() // self._chunk), 2)
        if tuple(table.shape) != shape:
            raise CorruptCheckpointError(
                f"{self.path}: {name}{TABLE} has shape {list(table.shape)}, {rest.numel()} numbers in chunks of "
                f"{self._chunk} call for {list(shape)}; {_REMEDY}"
            )
        num_bytes = int(table.numpy()[:, 0].sum(dtype=np.int64))
        if streams.ndim != 1 or num_bytes != streams.numel():
            raise CorruptCheckpointError(
                f"{self.path}: {name}{STREAMS} has shape {list(streams.shape)}, {name}{TABLE} calls for "
                f"[{num_bytes}]; {_REMEDY}"
            )


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Results of `work` for each item, in order; a single item is computed in the calling thread. Raises the first
    failure.

    Invariant: when it returns or raises, no thread is working any more, so that files in use may be closed or written.
    """
    items = list(items)
    if len(items) < 2:
        return [work(item) for item in items]
    running = [_threads().submit(work, item) for item in items]
    wait(running)
    return [future.result() for future in running]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="lossless")


def num_threads() -> int:
    """Number of threads that compress and decompress, at most as many as the CPUs that this process may use."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, num_cores)
