"""The bytes of a GGUF file on disk, and what a reader needs of a file anywhere."""

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CorruptCheckpointError


class GgufSource(Protocol):
    """One file. `remedy`: what to do where its content is wrong."""

    remedy: str

    def __len__(self) -> int: ...

    def header(self, start: int, end: int) -> bytes:
        """Those bytes, which are within the file. A header is read from its beginning to its end."""

    def read(self, start: int, num_bytes: int, noun: str) -> NDArray[np.uint8]:
        """A copy of the bytes of `noun`, which may be anywhere in the file. # [num_bytes]"""

    def close(self) -> None: ...


OpenSource = Callable[[Path], GgufSource]


class MappedFile:
    """A `GgufSource` on disk.

    Raises:
        CorruptCheckpointError: it cannot be opened, or is empty.
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
