"""Core board: a memory-mapped file by which workers of one machine lend each other their CPU cores while idle.

Each worker writes in its own slot whether it is busy, and reads the others'. A busy process uses its own cores and
those of idle workers. A lender that gets work has its cores back when the unit being computed there ends: after tens of
microseconds of a product, or milliseconds of a long prompt's attention. The last state of a crashed worker stays until
its successor writes the slot.
"""

import ctypes
import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.core.errors import ConfigurationError

_SLOT_BYTES = 64
_SLOT = struct.Struct("=ii28h")  # busy, threads, cores: -1 = no more
_MAX_CPUS = 28
# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
BORROW_FIELDS, TIME_FIELDS = "busy threads cpus num_cpus ok", "ns"
_READ_BY_HELPERS: list[mmap.mmap] = []  # helper threads never end, so these must stay mapped


class MissingBoardError(ConfigurationError):
    """The file does not exist."""


class Cores(Protocol):
    """Number of threads of a worker, and its CPUs; `cpus` empty = any."""

    @property
    def num_threads(self) -> int: ...
    @property
    def cpus(self) -> Sequence[int]: ...


class CoreBoard:
    """One worker's view of the file; `slot` is its own.

    Raises:
        MissingBoardError: the file does not exist.
        ConfigurationError: the file is not a core board, or has no such slot.
    """

    def __init__(self, path: Path, slot: int) -> None:
        self._slot = slot
        self._tell_borrowed: Callable[[int], None] | None = None
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except FileNotFoundError as error:
            raise MissingBoardError(f"core_board={str(path)!r} is not there; `tandem up` makes such files") from error
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"core_board={str(path)!r} cannot be mapped: {error}") from error
        if len(self._map) % _SLOT_BYTES or not 0 <= slot < self.num_slots:
            raise ConfigurationError(
                f"core_board={str(path)!r} has {len(self._map)} bytes and no slot {slot}; `tandem up` makes such files"
            )
        self.set_busy(False)

    @staticmethod
    def create(path: Path, workers: Sequence[Cores]) -> None:
        """Writes a new file, in which every worker is busy until it writes otherwise."""
        slots = []
        for worker in workers:
            cpus = (*worker.cpus[:_MAX_CPUS], *[-1] * max(0, _MAX_CPUS - len(worker.cpus)))
            slots.append(_SLOT.pack(1, worker.num_threads, *cpus))
        path.write_bytes(b"".join(slots))

    @property
    def num_slots(self) -> int:
        return len(self._map) // _SLOT_BYTES

    def set_busy(self, busy: bool) -> None:
        """Sets whether this worker needs its cores itself. Any thread may call it."""
        self._map[self._slot * _SLOT_BYTES : self._slot * _SLOT_BYTES + 4] = b"\1\0\0\0" if busy else b"\0\0\0\0"

    def is_busy(self, slot: int) -> bool:
        """Whether the worker of that slot needs its cores itself."""
        return bool(self._map[slot * _SLOT_BYTES])

    def borrow(self, cache_dir: Path | None = None) -> None:
        """Starts helper threads on the others' cores. May be called once per process.

        Raises:
            ConfigurationError: the kernels cannot be compiled or loaded here, or the system refuses such threads.
        """
        library = load_library(cache_dir)
        function = bind(library, "tandem_borrow_cores", BORROW_FIELDS)
        _READ_BY_HELPERS.append(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._tell_borrowed = bind(library, "tandem_borrowed_time", TIME_FIELDS)
        for slot in range(self.num_slots):
            if slot != self._slot:
                self._borrow_from(slot, function, address + slot * _SLOT_BYTES)

    def borrowed_s(self) -> float:
        """Seconds that this worker's own cores would have needed together for the work done so far on borrowed ones."""
        if self._tell_borrowed is None:
            return 0.0
        num_threads: int = _SLOT.unpack_from(self._map, self._slot * _SLOT_BYTES)[1]
        told = ctypes.c_int64()
        self._tell_borrowed(ctypes.addressof(told))
        return told.value / 1e9 / num_threads

    def _borrow_from(self, slot: int, function: Callable[..., None], busy: int) -> None:
        _, num_threads, *cpus = _SLOT.unpack_from(self._map, slot * _SLOT_BYTES)
        named = [cpu for cpu in cpus if cpu >= 0]
        cores, done = (ctypes.c_int64 * len(named))(*named), ctypes.c_int64()
        pointers = ctypes.addressof(cores), len(named), ctypes.addressof(done)
        function(busy, num_threads, *pointers)
        if not done.value:
            raise ConfigurationError(f"no threads can be started on the cores {named or 'any'} of slot {slot}")
