"""Executor of the simulated model: computes steps over real KV cache memory, in virtual time.

A step reads KV when it begins and writes when it ends. By `on_write` the simulation checks that no step writes a block
that is reserved for a transfer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.compute.arena import Arena
from tandem.engine.executor import FinishedStep
from tandem.scheduler.output import ExecutorOutput, NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.simulation.held_kv import HeldKV, joined
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.model import KV_BYTES, first_state, next_state, token_after
from tandem.simulation.node import Node

Write = tuple[int, int, bytes]  # block, position in it, KV


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a step in seconds, on a node that is not slow: a base, and a little for each token."""

    base_s: float = 0.02
    token_s: float = 2e-4

    def seconds(self, step: SchedulerOutput) -> float:
        """Duration of a step."""
        return self.base_s + self.token_s * step.num_tokens


def owner_of(request_id: str) -> str:
    """The owner (a client, whose name seeds the KV) of the request with the id OWNER.NUMBER."""
    return request_id.partition(".")[0]


@dataclass(slots=True)
class KnownRequest:
    """State of a request as described by the steps so far."""

    request: NewRequest
    blocks: list[int] = field(default_factory=list)


class KnownRequests:
    """Requests as a rank knows them: only from the steps that have described them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[str, KnownRequest] = {}

    def take(self, step: SchedulerOutput) -> None:
        """Take in what a step says of requests: new ones, added blocks, and released ones."""
        for request_id in step.released:
            self._known.pop(request_id, None)
        for request in step.new:
            self._known[request.request_id] = KnownRequest(request)
        for item in step.scheduled:
            if item.blocks is not None:
                self._known[item.request_id].blocks += item.blocks.added[0]

    def blocks(self, item: ScheduledRequest) -> Sequence[int]:
        """Block ids of the request so far."""
        return self._known[item.request_id].blocks

    def compute(self, item: ScheduledRequest, before: bytes, writes: list[Write]) -> bytes:
        """Returns `before`, the KV of all positions before the item, with that of the item's own, `KV_BYTES` for each
        position. Appends these to `writes`.
        """
        size, blocks = self._block_size, self.blocks(item)
        state = before[-KV_BYTES:] or first_state(owner_of(item.request_id))
        states = bytearray(before)
        for position, token_id in enumerate(item.token_ids, item.start):
            state = next_state(state, token_id)
            states += state
            writes.append((blocks[position // size], position % size, state))
        return bytes(states)

    def token(self, item: ScheduledRequest, states: bytes) -> SampledToken:
        """The request's next token, given the KV of all its positions."""
        request = self._known[item.request_id].request
        return SampledToken(token_after(states, None if request.params.temperature == 0 else request.seed))


class SimulatedExecutor:
    """`engine.executor.Executor` of a worker with one rank. `on_write` is called with blocks that a step will write.

    Args:
        cost: duration of a step.
    """

    def __init__(self, arena: Arena, node: Node, loop: VirtualLoop, cost: StepCost) -> None:
        self._held = HeldKV(arena.pages, arena.layout.block_size)
        self._known = KnownRequests(arena.layout.block_size)
        self._node = node
        self._loop = loop
        self._cost = cost
        self.on_write: Callable[[Sequence[int]], None] = lambda _: None

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        """Computes a step; its KV is written after the step's virtual duration."""
        self._known.take(step)
        writes: list[Write] = []
        sampled: dict[str, list[SampledToken]] = {}
        for item in step.scheduled:
            before = joined([self._held.read(self._known.blocks(item), item.start)])
            states = self._known.compute(item, before, writes)
            if item.samples:
                sampled[item.request_id] = [self._known.token(item, states)]
        self._loop.spend(self._cost.seconds(step) * self._node.slowness * self._node.random.uniform(0.8, 1.3))
        self._loop.call_soon_threadsafe(self._write, writes)
        return FinishedStep(ExecutorOutput(sampled, {}))

    def _write(self, writes: Sequence[Write]) -> None:
        self.on_write(list(dict.fromkeys(block for block, _, _ in writes)))
        for write in writes:
            self._held.write(*write)
