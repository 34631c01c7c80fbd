"""One rank's part of the simulated model: computes its heads of the KV from the heads of all ranks.

Runs in a fiber of the rank's node. A step writes in two halves, so a rank that is lost within it leaves a part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.executor import FinishedStep
from tandem.scheduler.output import ExecutorOutput, SchedulerOutput
from tandem.simulation.executor import KnownRequests, StepCost, Write
from tandem.simulation.fibers import current_fiber
from tandem.simulation.held_kv import HeldKV, joined
from tandem.simulation.node import Node
from tandem.simulation.rank_links import SimulatedExchange

_SLICE_S = 0.25  # after which a rank that is slow looks whether it still is


@dataclass(frozen=True, slots=True)
class RankInputs:
    """Placeholder for `ModelInputs`."""

    sample_rows: None = None


class SimulatedForward:
    """Stands for the `ForwardPass` of one rank, as far as `engine.ranks.ShardRunner` uses one. `on_write` is called
    with the blocks that a step is about to write.
    """

    def __init__(self, held: HeldKV, block_size: int, exchange: SimulatedExchange, node: Node, cost: StepCost) -> None:
        self._held, self._exchange, self._node, self._cost = held, exchange, node, cost
        self.known = KnownRequests(block_size)
        self.on_write: Callable[[Sequence[int]], None] = lambda _: None

    def run(self, step: SchedulerOutput, _: object = None) -> tuple[RankInputs, list[bytes]]:
        """Computes and writes this rank's part of a step; returns the KV of each scheduled request."""
        self.known.take(step)
        own = [self._held.read(self.known.blocks(item), item.start) for item in step.scheduled]
        parts = self._exchange.share(own)
        writes: list[Write] = []
        states = [
            self.known.compute(item, joined([part[index] for part in parts]), writes)
            for index, item in enumerate(step.scheduled)
        ]
        middle, seconds = len(writes) // 2, self._cost.seconds(step) * self._node.random.uniform(0.8, 1.3)
        for half in (writes[:middle], writes[middle:]):
            self._work(seconds / 2)
            self.on_write(list(dict.fromkeys(block for block, _, _ in half)))
            for write in half:
                self._held.write(*write)
        return RankInputs(), states

    def logits(self, hidden: object, rows: object) -> None:
        """Takes part in the exchange of logits. NOTE: it comes after the step's KV, as in a real model."""
        self._exchange.share(None)

    def advance_past_accepted(self, step: object, inputs: object, counts: object) -> None:
        """No effect: the simulated model has no recurrent state."""

    def _work(self, seconds: float) -> None:
        """Lets time pass. NOTE: in slices, so that a node that was slow for a while continues at its usual pace."""
        while seconds > 0:
            slowness = self._node.slowness
            worked_s = min(seconds, _SLICE_S / slowness)
            current_fiber().sleep(worked_s * slowness)
            seconds -= worked_s


class SimulatedLeader:
    """`Executor` of rank 0's part only; counterpart of `ModelRunner`."""

    def __init__(self, forward: SimulatedForward) -> None:
        self.forward = forward

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        _, states = self.forward.run(step)
        sampling = [(item, found) for item, found in zip(step.scheduled, states, strict=True) if item.samples]
        if sampling:
            self.forward.logits(states, None)
        sampled = {item.request_id: [self.forward.known.token(item, found)] for item, found in sampling}
        return FinishedStep(ExecutorOutput(sampled, {}))
