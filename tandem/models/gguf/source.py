"""Interface for reading the bytes of a GGUF file, wherever it is, and its implementation for a file on disk."""

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CorruptCheckpointError


class GgufSource(Protocol):
    """Bytes of one file. `remedy`: advice for messages about wrong content."""

    remedy: str

    def __len__(self) -> int: ...

    def header(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end - 1` of the header, which are within the file. A header is read in ascending order."""

    def read(self, start: int, num_bytes: int, noun: str) -> NDArray[np.uint8]:
        """A copy of `num_bytes` bytes anywhere in the file; `noun` names them in messages. # [num_bytes]"""

    def close(self) -> None: ...


OpenSource = Callable[[Path], GgufSource]


class MappedFile:
    """A `GgufSource` on disk.

    Raises:
        CorruptCheckpointError: the file cannot be opened, or is empty.
    """

    remedy = "download it again"

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opened:
            try:
                self._file = opened.enter_context(path.open("rb", buffering=0))
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # NOTE: an empty file cannot be mapped, which is a ValueError
                raise CorruptCheckpointError(f"{path} cannot be read as GGUF: {error}") from error
            opened.callback(self._map.close)
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        return len(self._map)

    def header(self, start: int, end: int) -> bytes:
        return self._map[start:end]

    def read(self, start: int, num_bytes: int, noun: str) -> NDArray[np.uint8]:
        stored = np.empty(num_bytes, np.uint8)
        self._file.seek(start)  # NOTE: pages of a mapping would count as this process's memory beside the copy
        done = 0
        while done < num_bytes:
            count = self._file.readinto(stored.data[done:])
            if not count:
                raise CorruptCheckpointError(f"{self._path} ends within {noun}; {self.remedy}")
            done += count
        return stored

    def close(self) -> None:
        self._opened.close()
