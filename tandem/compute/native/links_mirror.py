"""Mirror of a group's exchanges on one of its hosts: ranks of this host read data published by those of other hosts.

The ranks exchange through memory of their host (`links`). The hosts' processes send what is published in it to each
other, and write what they receive into it: by *lane*, which is one rank's data in one exchange or pipe. If there are
several stages, exchanges within a stage stay on one host, since each host has whole stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.architecture.tensors import MAX_GROUP_RANKS
from tandem.compute.native.exchange_mirror import ExchangeMirror
from tandem.compute.native.links_layout import PipeKind, group_buffer_bytes, pipe_offset


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Ranks of a group that one host has. With several stages each host has whole ones.

    Args:
        first, num_here: the host has ranks `first` to `first + num_here - 1` of `num_ranks`; other hosts have as many.
        num_stages, num_contexts: of the group.
    """

    first: int
    num_here: int
    num_ranks: int
    num_stages: int = 1
    num_contexts: int = 1

    @property
    def is_possible(self) -> bool:
        """Whether these sizes fit a host other than the leader's."""
        sizes = self.num_here, self.num_ranks, self.num_sections
        if min(sizes) < 1 or self.num_ranks > MAX_GROUP_RANKS or self.num_ranks % self.num_sections:
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
    """Mirror of all data that cross hosts of a group: the exchange of all ranks, and pipes between stages on different
    hosts.

    In a group of n ranks, lane r belongs to rank r in the exchange of all ranks. Lane n + r is its end of the pipe to
    the next stage, and lane 2 n + r its end of the pipe from the stage before.

    Args:
        descriptor: of memory made by `make_links_memory`; may be closed afterwards.
    """

    def __init__(self, descriptor: int, place: HostPlace) -> None:
        self._place = place
        num_ranks, num_sections = place.num_ranks, place.num_sections
        width = num_ranks // num_sections
        self._group = ExchangeMirror(descriptor, num_ranks, buffer_bytes=group_buffer_bytes(num_sections))
        self._mirrors = [self._group]
        self._lanes = {rank: (self._group, rank) for rank in range(num_ranks)}
        self._readers: dict[int, int] = {}  # of the lanes of pipes, the rank that reads them
        step = width * place.num_contexts  # between ranks of neighbouring stages
        for sender in range(step, num_ranks):
            receiver = sender - step
            if sender // place.num_here == receiver // place.num_here:
                continue
            section, number = num_sections - 1 - sender // width, sender % width
            offset = pipe_offset(num_ranks, num_sections, PipeKind.STREAM, section, number)
            pipe = ExchangeMirror(descriptor, 2, offset=offset)
            self._mirrors.append(pipe)
            for lane, end, reader in ((num_ranks + sender, 0, receiver), (2 * num_ranks + receiver, 1, sender)):
                self._lanes[lane], self._readers[lane] = (pipe, end), reader

    def lanes_of(self, ranks: range) -> Sequence[int]:
        """Lanes on which these ranks publish data for other hosts."""
        return [lane for lane in self._lanes if self.rank_of(lane) in ranks]

    def rank_of(self, lane: int) -> int:
        """The rank that publishes on a lane. Raises `ValueError` if the lane does not exist."""
        if lane not in self._lanes:
            raise ValueError(f"there is no lane {lane} between hosts with {self._place.num_ranks} ranks")
        return lane % self._place.num_ranks

    def is_read_by(self, lane: int, ranks: range) -> bool:
        """Whether one of these ranks, all on another host than the lane's rank, reads the lane."""
        return lane not in self._readers or self._readers[lane] in ranks

    def await_next(self, lane: int) -> tuple[int, memoryview] | None:
        """Waits for the next data on a lane of a rank on this host. The rest is as `ExchangeMirror.await_next`, and so
        are the following methods, with a lane in place of a rank.
        """
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
        """Ends all mirrored exchanges: every rank that waits there, now or later, gives up within 50 ms."""
        for mirror in self._mirrors:
            mirror.end()
