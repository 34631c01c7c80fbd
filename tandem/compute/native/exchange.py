"""Exchanges between the ranks of one host, through anonymous shared memory (`src/exchange.h`).

Only processes that inherit the memory's descriptor take part. A rank that waits for another gives up at its deadline,
or as soon as the group has been ended: no call waits for ever.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tandem.architecture.tensors import MAX_GROUP_RANKS
from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.compute.native.codes import DTYPE_CODES
from tandem.core.errors import RanksLostError
from tandem.core.expert_rows import ExpertRows

# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
ADD_FIELDS = "out_dtype group node bias out out_stride m n threads"
JOIN_FIELDS = "group part bounds out m"
GATHER_FIELDS = "group part out m row_bytes"
COLLECT_FIELDS = "out_dtype group terms owners out m k n threads"
PIPE_FIELDS = "group data size"
GROUP_FIELDS = ("memory", "rank", "num_ranks", "buffer_bytes", "deadline_ns", "count", "failure", "peer", "rows")
BUFFER_BYTES = 4 << 20  # of each of a rank's two buffers; more rows take several exchanges
HEADER_BYTES = 4096  # the page of counters
_COUNT, _FAILURE, _PEER = (GROUP_FIELDS.index(name) for name in ("count", "failure", "peer"))
_LATE = 1  # RankFailure
_BEAT, _BEATS_OFFSET, _LINE_BYTES = struct.Struct("@Q"), 2048, 64  # in the page of counters, behind those
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def num_bytes(num_ranks: int, buffer_bytes: int) -> int:
    """Bytes of the memory for one exchange: a page of counters, then two buffers of each rank."""
    return HEADER_BYTES + 2 * num_ranks * buffer_bytes


def end_group(memory: mmap.mmap) -> None:
    """Ends the group: every rank that waits in this memory, now or later, gives up within 50 ms. `memory`: mapped from
    the start of the exchange.
    """
    memory[0:4] = b"\1\0\0\0"


def beats_of(memory: mmap.mmap, num_ranks: int) -> tuple[int, ...]:
    """Number of heartbeats of each rank."""
    return tuple(_BEAT.unpack_from(memory, _beat_offset(rank))[0] for rank in range(num_ranks))


def set_beats(memory: mmap.mmap, rank: int, count: int) -> None:
    """Sets the number of heartbeats of a rank."""
    _BEAT.pack_into(memory, _beat_offset(rank), count)


def _beat_offset(rank: int) -> int:
    return _BEATS_OFFSET + rank * _LINE_BYTES


def make_memory(num_ranks: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Descriptor of new memory for one exchange; the caller closes it."""
    return make_memory_of(num_bytes(num_ranks, buffer_bytes))


def make_memory_of(size: int) -> int:
    """Descriptor of `size` bytes of new unnamed memory of fixed size; the caller closes it."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


class _Segment:
    """Part of a group's memory, in which `num_ranks` of its ranks exchange.

    Args:
        descriptor: of the group's memory; may be closed afterwards.
        offset: where the part begins in the memory, a number of whole pages.
        deadline_s: the longest that one exchange waits.
        members: for messages, the ranks' numbers in the group, and the size of the group; None = they are the group.
    """

    def __init__(
        self,
        descriptor: int,
        rank: int,
        num_ranks: int,
        *,
        deadline_s: float,
        buffer_bytes: int = BUFFER_BYTES,
        offset: int = 0,
        members: tuple[Sequence[int], int] | None = None,
    ) -> None:
        assert num_ranks <= MAX_GROUP_RANKS
        self._rank, self._num_ranks, self._buffer_bytes = rank, num_ranks, buffer_bytes
        self._deadline_s, self._offset = deadline_s, offset
        self._members = (range(num_ranks), num_ranks) if members is None else members
        self._group = (ctypes.c_int64 * len(GROUP_FIELDS))()
        self._rows = (ctypes.c_int64 * (num_ranks + 1))()
        self.open(descriptor)

    def open(self, descriptor: int) -> None:
        """Joins a new group of as many ranks, by its memory. Of the former group only `expert_rows` are kept."""
        self._map = mmap.mmap(descriptor, num_bytes(self._num_ranks, self._buffer_bytes), offset=self._offset)
        memory = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        deadline_ns = int(self._deadline_s * 1e9)
        self._group[:] = [memory, self._rank, self._num_ranks, self._buffer_bytes, deadline_ns, 0, 0, 0, 0]
        self._group[GROUP_FIELDS.index("rows")] = ctypes.addressof(self._rows)
        self._step, self._count_before = 0, 0

    @property
    def group(self) -> int:
        """Address of the struct that compiled functions need to take part; `check` must be called after them."""
        return ctypes.addressof(self._group)

    @property
    def num_exchanges(self) -> int:
        return self._group[_COUNT]

    def begin_step(self, number: int) -> None:
        """Sets the number of the step, for messages."""
        self._step, self._count_before = number, self.num_exchanges

    def end(self) -> None:
        """Ends the group: every rank that waits, now or later, gives up within 50 ms."""
        end_group(self._map)

    def check(self) -> None:
        """Raises `RanksLostError` if an exchange has failed; the message names the step, the exchange and the rank."""
        failure = self._group[_FAILURE]
        if failure:
            members, num_all = self._members
            late = f"did not take part within {self._deadline_s:g} s" if failure == _LATE else "is lost"
            raise RanksLostError(
                f"rank {members[self._group[_PEER]]} of {num_all} {late}: step {self._step}, exchange "
                f"{self.num_exchanges - self._count_before} of the step, as rank {members[self._rank]} saw it"
            )


class SharedPipe(_Segment):
    """Implements `StagePipe` (`compute.collectives`) between two ranks, of which rank 0 sends and rank 1 receives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        library = load_library()
        self._send = bind(library, "tandem_send_to_rank", PIPE_FIELDS)
        self._receive = bind(library, "tandem_receive_from_rank", PIPE_FIELDS)

    def send(self, rows: torch.Tensor) -> None:
        assert self._rank == 0
        rows = rows.contiguous()
        self._send(self.group, rows.data_ptr(), rows.nbytes)
        self.check()

    def receive(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._rank == 1
        assert rows.is_contiguous()
        self._receive(self.group, rows.data_ptr(), rows.nbytes)
        self.check()
        return rows


class SharedExchange(_Segment):
    """Implements `Collectives`, whose methods `compute.collectives` describes. Only one thread may exchange at a time;
    any thread may call `end`.
    """

    def __init__(self, *args: Any, library: ctypes.CDLL | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        library = load_library() if library is None else library
        self._add = bind(library, "tandem_add_over_ranks", ADD_FIELDS)
        self._join = bind(library, "tandem_join_over_ranks", JOIN_FIELDS)
        self._gather = bind(library, "tandem_gather_over_ranks", GATHER_FIELDS)
        self._collect = bind(library, "tandem_collect_over_ranks", COLLECT_FIELDS)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def expert_rows(self) -> ExpertRows:
        """Numbers of expert rows that `collect` has added so far, by rank."""
        *by_rank, busiest = self._rows
        return ExpertRows(tuple(by_rank), busiest)

    def beat(self) -> None:
        """Records a heartbeat, by which the leader sees that this process runs. Only one thread may call it."""
        set_beats(self._map, self._rank, self.beats[self._rank] + 1)

    @property
    def beats(self) -> tuple[int, ...]:
        """Number of heartbeats of each rank."""
        return beats_of(self._map, self._num_ranks)

    def add(self, node: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        m, n = node.shape
        out = torch.empty(m, n, dtype=dtype)
        assert node.dtype == torch.float32
        assert node.is_contiguous()
        assert n * node.itemsize <= self._buffer_bytes
        assert bias is None or (bias.dtype == dtype and bias.shape == (n,) and bias.is_contiguous())
        pointers = node.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
        self._add(DTYPE_CODES[dtype], self.group, *pointers, n, m, n, torch.get_num_threads())
        self.check()
        return out

    def join(self, part: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        widths = [end - start for start, end in pairwise(bounds)]
        assert len(widths) == self._num_ranks
        assert part.shape[1] == widths[self._rank]
        assert part.dtype == torch.float32
        assert part.is_contiguous()
        assert max(widths) * part.itemsize <= self._buffer_bytes
        out = torch.empty(len(part), bounds[-1]) if self._rank == 0 else part
        columns = torch.tensor(bounds, dtype=torch.int64)
        self._join(self.group, part.data_ptr(), columns.data_ptr(), out.data_ptr(), len(part))
        self.check()
        return out

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        m, size = part.shape
        out = part.new_empty(m, self._num_ranks * size)
        part = part.contiguous()
        row_bytes = size * part.itemsize
        assert 0 < row_bytes <= self._buffer_bytes
        self._gather(self.group, part.data_ptr(), out.data_ptr(), m, row_bytes)
        self.check()
        return out

    def collect(self, terms: torch.Tensor, owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (m, k), n = owners.shape, terms.shape[1]
        out = torch.empty(m, n, dtype=dtype)
        assert terms.dtype == torch.float32
        assert terms.is_contiguous()
        assert owners.dtype == torch.int64
        assert owners.is_contiguous()
        assert k * n * terms.itemsize <= self._buffer_bytes
        pointers = terms.data_ptr(), owners.data_ptr(), out.data_ptr()
        self._collect(DTYPE_CODES[dtype], self.group, *pointers, m, k, n, torch.get_num_threads())
        self.check()
        return out
