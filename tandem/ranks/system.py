"""Interface between a group of ranks and its machine: shared memory, the ranks' processes, and a watch on their ends.

It allows the same group to run over processes (`OwnSystem`) or in simulated time. Memory is named by file descriptors,
which processes inherit.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.compute import shared_pages
from tandem.compute.collectives import RankLinks
from tandem.compute.native.links import SharedLinks
from tandem.compute.native.links_layout import make_links_memory
from tandem.core.expert_rows import ExpertRows
from tandem.ranks.hangup import watch_for_hangup
from tandem.ranks.rank_process import LocalRank, RankProcess


class GroupLinks(Protocol):
    """All exchanges of one rank with its group, and the heartbeat counts of all ranks; see `SharedLinks`, which
    implements it in shared memory, for its methods.

    Args:
        num_sections: stages times contexts (a section is the ranks of one stage and one context).
        links: the exchanges, for the engine.
        expert_rows: rows computed so far by the experts of this rank's section.
        beats: number of heartbeats of each rank; `beat` adds one of this rank.
        open: changes to the memory of a new epoch; `end` ends all exchanges of this rank.
        begin_step: sets the number of the step, for messages.
    """

    num_ranks: int
    num_stages: int
    num_contexts: int
    num_sections: int
    links: RankLinks

    @property
    def expert_rows(self) -> ExpertRows: ...

    @property
    def beats(self) -> tuple[int, ...]: ...

    def stage_of(self, rank: int) -> int: ...

    def context_of(self, rank: int) -> int: ...

    def beat(self) -> None: ...

    def open(self, descriptor: int) -> None: ...

    def begin_step(self, number: int) -> None: ...

    def end(self) -> None: ...


class Watch(Protocol):
    """Signature of `watch_for_hangup`."""

    def __call__(
        self,
        descriptors: Sequence[int],
        on_hangup: Callable[[int], None],
        *,
        on_time: Callable[[], None] | None = None,
        every_s: float | None = None,
    ) -> Callable[[], None]: ...


class RankSystem(Protocol):
    """Makes memory and starts ranks on the leader's host. The creator of memory closes its descriptor; mappings
    stay.
    """

    @property
    def watch(self) -> Watch: ...

    def make_kv_memory(self) -> int:
        """Makes memory for the KV of all ranks, as yet without a size."""
        ...

    def take_kv(self, memory: int, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        """Sets the size of that memory, once, and maps it: [num_parts, num_pages, page_bytes] uint8."""
        ...

    def make_links_memory(self, num_ranks: int, num_sections: int) -> int:
        """Makes memory for the exchanges of one epoch."""
        ...

    def open_links(
        self, memory: int, num_ranks: int, num_stages: int, num_contexts: int, deadline_s: float
    ) -> GroupLinks:
        """The leader's exchanges in that memory."""
        ...

    def start_rank(self, memory: int, kv_memory: int, deadline_s: float) -> RankProcess:
        """Starts the process of a rank with both memories. `deadline_s`: the longest that a message to it may take."""
        ...

    def close(self, memory: int) -> None: ...


class OwnSystem:
    """Implements `RankSystem` by the processes and the memory of the real machine."""

    watch: Watch = staticmethod(watch_for_hangup)

    def make_kv_memory(self) -> int:
        return shared_pages.make_memory()

    def take_kv(self, memory: int, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        shared_pages.set_size(memory, num_parts * num_pages * page_bytes)
        return shared_pages.map_pages(memory, num_parts, num_pages, page_bytes)

    def make_links_memory(self, num_ranks: int, num_sections: int) -> int:
        return make_links_memory(num_ranks, num_sections)

    def open_links(
        self, memory: int, num_ranks: int, num_stages: int, num_contexts: int, deadline_s: float
    ) -> GroupLinks:
        return SharedLinks(memory, 0, num_ranks, num_stages, deadline_s=deadline_s, num_contexts=num_contexts)

    def start_rank(self, memory: int, kv_memory: int, deadline_s: float) -> RankProcess:
        return LocalRank(memory, kv_memory, deadline_s)

    def close(self, memory: int) -> None:
        os.close(memory)
