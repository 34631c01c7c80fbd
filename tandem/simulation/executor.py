"""Computes steps of the simulated model over a real arena, and takes virtual time for it.

A step reads KV when it begins and writes when it ends. Invariant it checks: it writes no block that a transfer may
write, and a transfer writes none that is not pinned for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.attention.arena import Arena
from tandem.scheduler.output import ExecutorOutput, SampledToken, ScheduledRequest, SchedulerOutput
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
    """Whose request an id names: requests of a simulation are called OWNER.NUMBER."""
    return request_id.partition(".")[0]


class SimulatedExecutor:
    """`Executor` of one node. `on_write` is told the blocks that a step is about to write.

    Args:
        cost: what a step takes.
    """

    def __init__(self, arena: Arena, node: Node, loop: VirtualLoop, cost: StepCost) -> None:
        self._pages = arena.pages.view(-1).numpy().data
        self._page_bytes = arena.layout.page_bytes
        self._block_size = arena.layout.block_size
        self._node = node
        self._loop = loop
        self._cost = cost
        self.on_write: Callable[[Sequence[int]], None] = lambda _: None

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        writes: list[tuple[int, int, bytes]] = []
        sampled: dict[str, SampledToken] = {}
        for item in step.scheduled:
            states = self._compute(item, writes)
            if item.samples:
                params = item.request.params
                seed = None if params.temperature == 0 else item.request.seed
                sampled[item.request.request_id] = SampledToken(token_after(states, seed))
        self._loop.spend(self._cost.seconds(step) * self._node.slowness * self._node.random.uniform(0.8, 1.3))
        self._loop.call_soon_threadsafe(self._write, writes)
        return ExecutorOutput(sampled, {})

    def _compute(self, item: ScheduledRequest, writes: list[tuple[int, int, bytes]]) -> bytes:
        """The KV of all positions up to the item's end."""
        blocks, size = item.block_table.groups[0], self._block_size
        before = self._read(blocks, item.start)
        state = before[-KV_BYTES:] or first_state(owner_of(item.request.request_id))
        states = bytearray(before)
        for position in range(item.start, item.end):
            state = next_state(state, item.request.token_ids[position])
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
