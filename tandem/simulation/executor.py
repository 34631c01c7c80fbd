"""Executor of the simulated model: computes steps over real KV cache memory, in virtual time.

A step reads KV when it begins and writes when it ends. Checks the invariant that a step writes no block that a transfer
may write, and that a transfer writes only blocks pinned for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.compute.arena import Arena
from tandem.engine.executor import FinishedStep
from tandem.scheduler.output import ExecutorOutput, NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.model import KV_BYTES, first_state, next_state, token_after
from tandem.simulation.node import Node


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step on a node that is not slow: a base, and a little for each token."""

    base_s: float = 0.02
    token_s: float = 2e-4

    def seconds(self, step: SchedulerOutput) -> float:
        return self.base_s + self.token_s * step.num_tokens


def owner_of(request_id: str) -> str:
    """Returns the owner of a request from its id, OWNER.NUMBER."""
    return request_id.partition(".")[0]


@dataclass(slots=True)
class _Known:
    """State of a request as described by the steps so far."""

    request: NewRequest
    blocks: list[int] = field(default_factory=list)


class SimulatedExecutor:
    """`Executor` of one node, which knows only what steps have described of a request.

    `on_write` is called with the blocks that a step is about to write.

    Args:
        cost: duration of a step.
    """

    def __init__(self, arena: Arena, node: Node, loop: VirtualLoop, cost: StepCost) -> None:
        self._pages = arena.pages.view(-1).numpy().data
        self._page_bytes = arena.layout.page_bytes
        self._block_size = arena.layout.block_size
        self._node = node
        self._loop = loop
        self._cost = cost
        self._known: dict[str, _Known] = {}
        self.on_write: Callable[[Sequence[int]], None] = lambda _: None

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        for request_id in step.released:
            self._known.pop(request_id, None)
        for request in step.new:
            self._known[request.request_id] = _Known(request)
        return FinishedStep(self._execute(step))

    def _execute(self, step: SchedulerOutput) -> ExecutorOutput:
        writes: list[tuple[int, int, bytes]] = []
        sampled: dict[str, list[SampledToken]] = {}
        for item in step.scheduled:
            known = self._known[item.request_id]
            if item.blocks is not None:
                known.blocks += item.blocks.added[0]
            states = self._compute(item, known.blocks, writes)
            if item.samples:
                request = known.request
                seed = None if request.params.temperature == 0 else request.seed
                sampled[item.request_id] = [SampledToken(token_after(states, seed))]
        self._loop.spend(self._cost.seconds(step) * self._node.slowness * self._node.random.uniform(0.8, 1.3))
        self._loop.call_soon_threadsafe(self._write, writes)
        return ExecutorOutput(sampled, {})

    def _compute(self, item: ScheduledRequest, blocks: Sequence[int], writes: list[tuple[int, int, bytes]]) -> bytes:
        """Computes the KV of all positions up to the item's end."""
        size = self._block_size
        before = self._read(blocks, item.start)
        state = before[-KV_BYTES:] or first_state(owner_of(item.request_id))
        states = bytearray(before)
        for position, token_id in enumerate(item.token_ids, item.start):
            state = next_state(state, token_id)
            states += state
            writes.append((blocks[position // size], position % size * KV_BYTES, state))
        return bytes(states)

    def _read(self, blocks: Sequence[int], num_tokens: int) -> bytes:
        page, num_blocks = self._page_bytes, -(-num_tokens // self._block_size)
        data = b"".join(self._pages[block * page : (block + 1) * page] for block in blocks[:num_blocks])
        return data[: num_tokens * KV_BYTES]

    def _write(self, writes: Sequence[tuple[int, int, bytes]]) -> None:
        self.on_write(list(dict.fromkeys(block for block, _, _ in writes)))
        for block, offset, state in writes:
            start = block * self._page_bytes + offset
            self._pages[start : start + KV_BYTES] = state
