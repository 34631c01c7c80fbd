"""All exchanges of one rank, in the shared memory of its group: with the whole group, within its section, and pipes to
neighbouring sections.

A section is the ranks that compute one pipeline stage for one context (a part of a prompt's tokens). Its number is
`stage * num_contexts + context`. Ranks count from the last section, where the leader is: rank r is number `r % width`
of section `num_sections - 1 - r // width`.
"""

from tandem.compute.collectives import RankLinks
from tandem.compute.native.exchange import SharedExchange, SharedPipe
from tandem.compute.native.links_layout import PipeKind, group_buffer_bytes, pipe_offset, section_offset
from tandem.core.expert_rows import ExpertRows

_SECTION_DEADLINES = 6  # a section waits for all layers of another section, so its deadline is a multiple


class SharedLinks:
    """Makes the `RankLinks` of one rank, in `links`.

    Args:
        descriptor: of memory made by `make_links_memory`; may be closed afterwards.
        num_ranks: size of the group, a multiple of the number of sections.
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
        self._group = SharedExchange(
            descriptor, rank, num_ranks, deadline_s=long_s, buffer_bytes=group_buffer_bytes(self.num_sections)
        )
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
                offset=section_offset(num_ranks, self.num_sections, section),
                members=(range(first, first + width), num_ranks),
            )
            ends = section - num_contexts, section, section + num_contexts
            if stage > 0:
                before = self._pipe(descriptor, PipeKind.STREAM, ends[:2], number, 1, long_s)
            if stage + 1 < num_stages:
                after = self._pipe(descriptor, PipeKind.STREAM, ends[1:], number, 0, long_s)
        if num_contexts > 1:
            own = stage * num_contexts
            ends = own + (context - 1) % num_contexts, own + context, own + (context + 1) % num_contexts
            earlier = self._pipe(descriptor, PipeKind.WORD, ends[:2], number, 1, long_s)
            later = self._pipe(descriptor, PipeKind.WORD, ends[1:], number, 0, long_s)
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
        """Pipeline stage of any rank of the group."""
        return self._section_of(rank) // self.num_contexts

    def context_of(self, rank: int) -> int:
        """Context of any rank of the group."""
        return self._section_of(rank) % self.num_contexts

    @property
    def beats(self) -> tuple[int, ...]:
        """Number of heartbeats of each rank."""
        return self._group.beats

    def beat(self) -> None:
        """Records a heartbeat, by which the leader sees that this process runs. Only one thread may call it."""
        self._group.beat()

    def open(self, descriptor: int) -> None:
        """Joins a new group, after the former one has lost a rank. `descriptor`: of its memory."""
        for each in self._own:
            each.open(descriptor)

    def begin_step(self, number: int) -> None:
        """Sets the number of the step, for messages."""
        for each in self._own:
            each.begin_step(number)

    def end(self) -> None:
        """Ends all exchanges in which this rank takes part; other ranks then end those among themselves."""
        for each in self._own:
            each.end()

    def _section_of(self, rank: int) -> int:
        return self.num_sections - 1 - rank // (self.num_ranks // self.num_sections)

    def _pipe(
        self, descriptor: int, kind: PipeKind, sections: tuple[int, ...], number: int, end: int, deadline_s: float
    ) -> SharedPipe:
        """Pipe from the first of two sections to the second; `end`: 0 = this rank sends, 1 = it receives."""
        width = self.num_ranks // self.num_sections
        sender, receiver = (self.num_ranks - (section + 1) * width + number for section in sections)
        return SharedPipe(
            descriptor,
            end,
            2,
            deadline_s=deadline_s,
            offset=pipe_offset(self.num_ranks, self.num_sections, kind, sections[0], number),
            members=((sender, receiver), self.num_ranks),
        )
