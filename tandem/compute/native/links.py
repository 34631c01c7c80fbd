"""All exchanges of one rank, in the memory of its group: with the group, within its section, and with those beside it;
and what a host mirrors of them, where the group has several.

A section computes one context, a part of the tokens of prompts, in one stage of layers. Its number is
`stage * num_contexts + context`. Ranks count from the last one, where the leader is: rank r is number `r % width` of
section `num_sections - 1 - r // width`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tandem.architecture.tensors import MAX_RANKS
from tandem.compute.collectives import RankLinks
from tandem.compute.native.exchange import (
    BUFFER_BYTES,
    SharedExchange,
    SharedPipe,
    make_memory,
    make_memory_of,
    num_bytes,
)
from tandem.compute.native.exchange_mirror import ExchangeMirror
from tandem.core.expert_rows import ExpertRows

_SMALL_BYTES = 1 << 16  # where no rows of activations are exchanged
_SECTION_DEADLINES = 6  # a section waits for all layers of another, not for a sum of one


class _Kind(IntEnum):
    """Of pipes: to the next stage with the residual stream, and to the next context with a word."""

    STREAM = 0
    WORD = 1


class SharedLinks:
    """Args:
    descriptor: of memory by `make_links_memory`, which may be closed after this.
    num_ranks: of the group, a multiple of the number of sections.
    num_stages, num_contexts: as in `RankLinks`; their product is the number of sections.
    deadline_s: the longest that an exchange within a section waits; others wait six times as long.
    """

    def __init__(
        self,
        descriptor: int,
        rank: int,
        num_ranks: int,
        num_stages: int,
        *,
        deadline_s: float,
        num_contexts: int = 1,
    ) -> None:
        self.rank, self.num_ranks, self.deadline_s = rank, num_ranks, deadline_s
        self.num_stages, self.num_contexts, self.num_sections = num_stages, num_contexts, num_stages * num_contexts
        width = num_ranks // self.num_sections
        stage, context, number = self.stage_of(rank), self.context_of(rank), rank % width
        long_s = deadline_s if self.num_sections == 1 else _SECTION_DEADLINES * deadline_s
        small = BUFFER_BYTES if self.num_sections == 1 else _SMALL_BYTES
        self._group = SharedExchange(descriptor, rank, num_ranks, deadline_s=long_s, buffer_bytes=small)
        self._shard = self._group
        before = after = earlier = later = None
        if self.num_sections > 1:
            section = self._section_of(rank)
            first = num_ranks - (section + 1) * width
            self._shard = SharedExchange(
                descriptor,
                number,
                width,
                deadline_s=deadline_s,
                offset=_shard_offset(num_ranks, self.num_sections, section),
                members=(range(first, first + width), num_ranks),
            )
            ends = section - num_contexts, section, section + num_contexts
            if stage > 0:
                before = self._pipe(descriptor, _Kind.STREAM, ends[:2], number, 1, long_s)
            if stage + 1 < num_stages:
                after = self._pipe(descriptor, _Kind.STREAM, ends[1:], number, 0, long_s)
        if num_contexts > 1:
            own = stage * num_contexts
            ends = own + (context - 1) % num_contexts, own + context, own + (context + 1) % num_contexts
            earlier = self._pipe(descriptor, _Kind.WORD, ends[:2], number, 1, long_s)
            later = self._pipe(descriptor, _Kind.WORD, ends[1:], number, 0, long_s)
        every = self._group, self._shard, before, after, earlier, later
        self._own = [each for each in every if each is not None]
        self.links = RankLinks(
            self._group, self._shard, stage, num_stages, before, after, earlier, later, context, num_contexts
        )

    @property
    def expert_rows(self) -> ExpertRows:
        """Rows that the experts of this rank's section have computed so far."""
        return self._shard.expert_rows

    def stage_of(self, rank: int) -> int:
        """Of any rank of the group."""
        return self._section_of(rank) // self.num_contexts

    def context_of(self, rank: int) -> int:
        """Of any rank of the group."""
        return self._section_of(rank) % self.num_contexts

    @property
    def beats(self) -> tuple[int, ...]:
        """Number of heartbeats of each rank."""
        return self._group.beats

    def beat(self) -> None:
        """Shows that this process lives; by one thread of it."""
        self._group.beat()

    def open(self, descriptor: int) -> None:
        """Takes part in a new group, see `SharedExchange.open`."""
        for each in self._own:
            each.open(descriptor)

    def begin_step(self, number: int) -> None:
        """Sets the step that messages name from now on."""
        for each in self._own:
            each.begin_step(number)

    def end(self) -> None:
        """Ends the group, so far as this rank takes part; what others wait for among themselves ends with those."""
        for each in self._own:
            each.end()

    def _section_of(self, rank: int) -> int:
        return self.num_sections - 1 - rank // (self.num_ranks // self.num_sections)

    def _pipe(
        self, descriptor: int, kind: _Kind, sections: tuple[int, ...], number: int, end: int, deadline_s: float
    ) -> SharedPipe:
        """From the first of two sections to the second; `end`: 0 = where rows are sent."""
        width = self.num_ranks // self.num_sections
        sender, receiver = (self.num_ranks - (section + 1) * width + number for section in sections)
        return SharedPipe(
            descriptor,
            end,
            2,
            deadline_s=deadline_s,
            offset=_pipe_offset(self.num_ranks, self.num_sections, kind, sections[0], number),
            members=((sender, receiver), self.num_ranks),
        )


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Ranks of one of the hosts of a group. With several stages each host has whole ones.

    Args:
        first, num_here: ranks `first` to `first + num_here - 1` of `num_ranks`; other hosts have as many.
        num_stages, num_contexts: of the group.
    """

    first: int
    num_here: int
    num_ranks: int
    num_stages: int = 1
    num_contexts: int = 1

    @property
    def is_possible(self) -> bool:
        """Whether it may be that of a host that does not lead."""
        sizes = self.num_here, self.num_ranks, self.num_sections
        if min(sizes) < 1 or self.num_ranks > MAX_RANKS or self.num_ranks % self.num_sections:
            return False
        if self.num_ranks % self.num_here or self.first % self.num_here:
            return False
        stage = self.num_ranks // self.num_stages
        is_whole = self.num_here % stage == 0 if self.num_stages > 1 else self.num_contexts == 1
        return is_whole and 0 < self.first < self.num_ranks

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.num_here)

    @property
    def num_sections(self) -> int:
        return self.num_stages * self.num_contexts


class LinksMirror:
    """Mirror of what crosses hosts of a group: the exchange of all ranks, and pipes between stages on different hosts.

    A *lane* is what one rank publishes in one of them. Lane r is that of rank r in the exchange of all n ranks, lane
    n + r where it sends to the next stage, and lane 2 n + r where it takes from the stage before.

    Args:
        descriptor: of memory by `make_links_memory`, which may be closed after this.
    """

    def __init__(self, descriptor: int, place: HostPlace) -> None:
        self._place = place
        num_ranks, num_sections = place.num_ranks, place.num_sections
        width = num_ranks // num_sections
        small = BUFFER_BYTES if num_sections == 1 else _SMALL_BYTES
        self._group = ExchangeMirror(descriptor, num_ranks, buffer_bytes=small)
        self._mirrors = [self._group]
        self._lanes = {rank: (self._group, rank) for rank in range(num_ranks)}
        self._readers: dict[int, int] = {}  # of the lanes of pipes, the rank that reads them
        step = width * place.num_contexts  # between ranks of neighbouring stages
        for sender in range(step, num_ranks):
            receiver = sender - step
            if sender // place.num_here == receiver // place.num_here:
                continue
            section, number = num_sections - 1 - sender // width, sender % width
            offset = _pipe_offset(num_ranks, num_sections, _Kind.STREAM, section, number)
            pipe = ExchangeMirror(descriptor, 2, offset=offset)
            self._mirrors.append(pipe)
            for lane, end, reader in ((num_ranks + sender, 0, receiver), (2 * num_ranks + receiver, 1, sender)):
                self._lanes[lane], self._readers[lane] = (pipe, end), reader

    def lanes_of(self, ranks: range) -> Sequence[int]:
        """Lanes on which these ranks publish for other hosts."""
        return [lane for lane in self._lanes if self.rank_of(lane) in ranks]

    def rank_of(self, lane: int) -> int:
        """The rank that publishes there. Raises `ValueError` for a lane that there is not."""
        if lane not in self._lanes:
            raise ValueError(f"there is no lane {lane} between hosts with {self._place.num_ranks} ranks")
        return lane % self._place.num_ranks

    def is_read_by(self, lane: int, ranks: range) -> bool:
        """Whether one of these ranks, which are of another host than the lane's, reads what is published there."""
        return lane not in self._readers or self._readers[lane] in ranks

    def await_next(self, lane: int) -> tuple[int, memoryview] | None:
        """See `ExchangeMirror.await_next`, as the others."""
        mirror, rank = self._lanes[lane]
        return mirror.await_next(rank)

    def room_for(self, lane: int, number: int, size: int) -> memoryview:
        mirror, rank = self._lanes[lane]
        return mirror.room_for(rank, number, size)

    def publish(self, lane: int, size: int) -> None:
        mirror, rank = self._lanes[lane]
        mirror.publish(rank, size)

    @property
    def beats(self) -> Sequence[int]:
        """Number of heartbeats of each rank."""
        return self._group.beats

    def set_beats(self, rank: int, count: int) -> None:
        self._group.set_beats(rank, count)

    def end(self) -> None:
        """Ends what is mirrored: every rank that waits there, or will, gives up within 50 ms."""
        for mirror in self._mirrors:
            mirror.end()


def make_links_memory(num_ranks: int, num_sections: int) -> int:
    """A descriptor of new memory for a group; the caller closes it."""
    if num_sections == 1:
        return make_memory(num_ranks)
    return make_memory_of(_pipe_offset(num_ranks, num_sections, len(_Kind), 0, 0))


def _shard_offset(num_ranks: int, num_sections: int, section: int) -> int:
    return num_bytes(num_ranks, _SMALL_BYTES) + section * num_bytes(num_ranks // num_sections, BUFFER_BYTES)


def _pipe_offset(num_ranks: int, num_sections: int, kind: int, section: int, number: int) -> int:
    """NOTE: memory that no rank touches is none, so that there is room for pipes that a group has no use for."""
    index = kind * num_ranks + section * (num_ranks // num_sections) + number
    return _shard_offset(num_ranks, num_sections, num_sections) + index * num_bytes(2, BUFFER_BYTES)
