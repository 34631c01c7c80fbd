"""Exchanges between the ranks of a simulated worker, in virtual time: Python values in memory shared by one epoch.

Like `compute.native.exchange`, a rank that waits for another one gives up at its deadline, or when the group has ended.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from tandem.compute.collectives import Collectives, RankLinks
from tandem.core.errors import RanksLostError
from tandem.core.expert_rows import ExpertRows
from tandem.simulation.fibers import Signal, current_fiber


class ExchangeMemory:
    """Values, counts and heartbeats of one epoch's ranks. `can_see`: whether what one rank publishes reaches another,
    by numbers.
    """

    def __init__(self, num_ranks: int, can_see: Callable[[int, int], bool]) -> None:
        self.num_ranks, self.can_see = num_ranks, can_see
        self.values: dict[tuple[int, int], Any] = {}
        self.counts = [0] * num_ranks
        self.beats = [0] * num_ranks
        self.num_started = 1  # the leader
        self.is_ended = False
        self.changed = Signal()


class SimulatedExchange:
    """The part of `Collectives` that a step of the simulated model needs, for one rank."""

    def __init__(self, memory: ExchangeMemory, rank: int, deadline_s: float) -> None:
        self.memory, self.rank, self._deadline_s = memory, rank, deadline_s
        self.step = 0

    @property
    def num_ranks(self) -> int:
        return self.memory.num_ranks

    def share(self, value: Any) -> list[Any]:
        """Contributes `value`; returns the values of all ranks.

        Raises:
            RanksLostError: one of them is lost or late.
        """
        memory, number = self.memory, self.memory.counts[self.rank]
        memory.values[number, self.rank] = value
        memory.counts[self.rank] += 1
        memory.changed.notify()

        def lacking() -> list[int]:
            seen = (other for other in range(self.num_ranks) if other != self.rank)
            return [r for r in seen if memory.counts[r] <= number or not memory.can_see(r, self.rank)]

        is_done = current_fiber().wait_for(lambda: memory.is_ended or not lacking(), memory.changed, self._deadline_s)
        if memory.is_ended or not is_done:
            late = "is lost" if memory.is_ended else f"did not take part within {self._deadline_s:g} s"
            raise RanksLostError(f"a rank of {self.num_ranks} {late}: step {self.step}, as rank {self.rank} saw it")
        memory.values.pop((number - 2, self.rank), None)
        return [memory.values[number, rank] for rank in range(self.num_ranks)]

    def add(self, node: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Waits for all ranks at the end of a step without logits. NOTE: returns no sum, since nobody looks at it."""
        self.share(None)
        return node


class SimulatedLinks:
    """`ranks.system.GroupLinks` of one rank, for groups that divide heads only (no stages or contexts)."""

    num_stages = num_contexts = num_sections = 1

    def __init__(
        self, memory_of: Callable[[int], ExchangeMemory], descriptor: int, rank: int, deadline_s: float
    ) -> None:
        self._memory_of = memory_of
        memory = memory_of(descriptor)
        self.num_ranks, self.exchange = memory.num_ranks, SimulatedExchange(memory, rank, deadline_s)
        collectives = cast(Collectives, self.exchange)
        self.links = RankLinks(collectives, collectives)

    @property
    def expert_rows(self) -> ExpertRows:
        return ExpertRows((0,) * self.num_ranks, 0)

    @property
    def beats(self) -> tuple[int, ...]:
        return tuple(self.exchange.memory.beats)

    def stage_of(self, rank: int) -> int:
        return 0

    def context_of(self, rank: int) -> int:
        return 0

    def beat(self) -> None:
        self.exchange.memory.beats[self.exchange.rank] += 1

    def open(self, descriptor: int) -> None:
        self.exchange.memory = self._memory_of(descriptor)

    def begin_step(self, number: int) -> None:
        self.exchange.step = number

    def end(self) -> None:
        self.exchange.memory.is_ended = True
        self.exchange.memory.changed.notify()
