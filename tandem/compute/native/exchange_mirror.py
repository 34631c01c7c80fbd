"""Mirror of exchange memory between hosts: data published by ranks of this host are read from the memory here, and data
of ranks on other hosts are written into it (`src/exchange.h`).

The ranks themselves do not know which of them are on this host: they exchange through memory, with the same bits.
"""

import ctypes
import mmap
from collections.abc import Sequence

from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.compute.native.exchange import (
    BUFFER_BYTES,
    GROUP_FIELDS,
    HEADER_BYTES,
    beats_of,
    end_group,
    num_bytes,
    set_beats,
)

# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
AWAIT_FIELDS = "group size"
PUBLISH_FIELDS = "group size"
_COUNT = GROUP_FIELDS.index("count")
_NO_DEADLINE_NS = 2**62


class ExchangeMirror:
    """Access to one exchange's memory for copying its data between hosts. For each rank, only one thread at a time may
    call.

    Args:
        descriptor: of the memory; may be closed afterwards.
        num_ranks: number of ranks that exchange in it.
        offset: where the exchange begins in the memory, see `_Segment`.
    """

    def __init__(
        self,
        descriptor: int,
        num_ranks: int,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        offset: int = 0,
        library: ctypes.CDLL | None = None,
    ) -> None:
        library = load_library() if library is None else library
        self._num_ranks, self._buffer_bytes = num_ranks, buffer_bytes
        self._map = mmap.mmap(descriptor, num_bytes(num_ranks, buffer_bytes), offset=offset)
        self._view = memoryview(self._map)
        memory = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        values = [[memory, rank, num_ranks, buffer_bytes, _NO_DEADLINE_NS, 0, 0, 0] for rank in range(num_ranks)]
        self._ranks = [(ctypes.c_int64 * len(GROUP_FIELDS))(*each) for each in values]
        self._await = bind(library, "tandem_await_rank", AWAIT_FIELDS)
        self._publish = bind(library, "tandem_publish_rank", PUBLISH_FIELDS)

    def await_next(self, rank: int) -> tuple[int, memoryview] | None:
        """Waits, without a deadline, for the next exchange of a rank on this host. Returns its number, from 1, and its
        bytes, which stay valid until all other hosts have them. None = the group has ended.
        """
        size = ctypes.c_int64()
        self._await(ctypes.addressof(self._ranks[rank]), ctypes.addressof(size))
        number: int = self._ranks[rank][_COUNT]
        return None if size.value < 0 else (number, self._buffer(rank, number)[: size.value])

    def room_for(self, rank: int, number: int, size: int) -> memoryview:
        """Memory into which the bytes of exchange `number` of a rank on another host are to be written.

        Raises:
            ValueError: it is not the next exchange, or too large.
        """
        expected = self._ranks[rank][_COUNT] + 1
        if number != expected or not 0 <= size <= self._buffer_bytes:
            raise ValueError(f"rank {rank} published {size} bytes as exchange {number}, after {expected - 1}")
        return self._buffer(rank, number)[:size]

    def publish(self, rank: int, size: int) -> None:
        """Makes the bytes written into the last `room_for` available to the ranks of this host."""
        self._publish(ctypes.addressof(self._ranks[rank]), size)

    @property
    def beats(self) -> Sequence[int]:
        """Number of heartbeats of each rank."""
        return beats_of(self._map, self._num_ranks)

    def set_beats(self, rank: int, count: int) -> None:
        """Sets a rank's number of heartbeats, as reported by its host."""
        set_beats(self._map, rank, count)

    def end(self) -> None:
        """Ends the group on this host: every rank that waits, now or later, gives up within 50 ms."""
        end_group(self._map)

    def _buffer(self, rank: int, number: int) -> memoryview:
        start = HEADER_BYTES + (2 * rank + number % 2) * self._buffer_bytes
        return self._view[start : start + self._buffer_bytes]
