"""Two kinds of state that no model here has, and a fake executor that keeps them: what the managers must serve
without knowing.
"""

import math
from dataclasses import dataclass

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.state import KVSpec, Plane, StateSpec
from tandem.kvcache.spec import KVGroup, KVLayout
from tandem.scheduler.output import SampledToken, ScheduledRequest
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.layouts import BLOCK_SIZE

ATTENTION = KVSpec(num_kv_heads=1, head_dim=8, dtype="float32")
SLIDING = KVSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=6)


@dataclass(frozen=True, slots=True)
class ToyLatentSpec(StateSpec):
    """One array of `size` numbers a token, all of which every query sees."""

    size: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("latent", (self.size,), "bfloat16", token_axis=0),)


@dataclass(frozen=True, slots=True)
class ToyRecurrentSpec(StateSpec):
    """A state of `size` numbers that each token changes. It can be gone on from where a checkpoint was taken: at the
    first end of a block at or after every `interval` tokens.
    """

    size: int
    interval: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return Plane("conv", (self.size, 3), "bfloat16", token_axis=None), Plane(
            "recurrent", (self.size,), "float32", token_axis=None
        )

    @property
    def is_bounded(self) -> bool:
        return True

    def needed(self, position: int) -> int:
        """The state after the token before."""
        return max(0, position - 1)

    def publishable(self, first: int, end: int, block_size: int) -> range:
        step = math.ceil(self.interval / block_size)
        return range(first + -(first + 1) % step, end, step)


def toy_layout(*specs: StateSpec, pages_per_state: tuple[int, ...] = (2, 3)) -> KVLayout:
    """One single-layer group for each. Blocks of constant states have so many pages, in turn."""
    page_bytes = max(spec.block_bytes(BLOCK_SIZE) for spec in specs)
    counts = [pages_per_state[i % len(pages_per_state)] if spec.is_constant else 1 for i, spec in enumerate(specs)]
    groups = (KVGroup(spec, (i,), count) for i, (spec, count) in enumerate(zip(specs, counts, strict=True)))
    return KVLayout(BLOCK_SIZE, tuple(groups), page_bytes)


LAYOUTS = {
    "latent": toy_layout(ToyLatentSpec(6)),
    "latent+sliding": toy_layout(ToyLatentSpec(6), SLIDING),
    "entries+parts+rows": toy_layout(
        EntriesSpec(6, "float32", 10, 2), EntryInputsSpec(4, "float32", 5, 2), RowsSpec(6, "float32", 6)
    ),
    "recurrent": toy_layout(ToyRecurrentSpec(4, 2 * BLOCK_SIZE)),
    "full+recurrent": toy_layout(ATTENTION, ToyRecurrentSpec(4, 3 * BLOCK_SIZE)),
    "latent+sliding+2 recurrent": toy_layout(
        ToyLatentSpec(6), SLIDING, ToyRecurrentSpec(4, 2 * BLOCK_SIZE), ToyRecurrentSpec(5, 3 * BLOCK_SIZE)
    ),
}


class StateExecutor(FakeExecutor):
    """A `FakeExecutor` that also keeps states: it reads the one before a chunk and writes those after each of the
    chunk's blocks that has memory, up to its drafts; then those after the drafts that are right. All offsets of such a
    block hold the same.
    """

    def __init__(self, layout: KVLayout, acceptance: float | None = None) -> None:
        super().__init__(layout, acceptance=acceptance)
        self._by_token = [all(plane.token_axis is not None for plane in g.spec.planes) for g in layout.groups]

    def _compute(self, item: ScheduledRequest) -> None:
        known = self._known[item.request_id]
        known.take(item)
        for group, blocks in enumerate(known.tables):
            if self._by_token[group]:
                self._read_keys(group, blocks, known.contents, item.start)
                self._write_keys(group, blocks, known.contents, item.start, item.end)
            else:
                self._take(group, blocks, known.contents, item.start)
                self._put(group, blocks, known.contents, item.start, item.end - item.num_drafts)

    def _sample(self, item: ScheduledRequest) -> list[SampledToken]:
        tokens, known = super()._sample(item), self._known[item.request_id]
        kept = item.end - item.num_drafts
        for group, blocks in enumerate(known.tables):
            if not self._by_token[group] and len(tokens) > 1:
                self._put(group, blocks, known.contents, kept, kept + len(tokens) - 1)
        return tokens

    def _read_keys(self, group: int, blocks: list[int], contents: list[int], start: int) -> None:
        assert self._layout is not None
        for position in range(self._layout.groups[group].spec.needed(start), start):
            held = self._arena.get((blocks[position // BLOCK_SIZE], position % BLOCK_SIZE))
            assert held == (group, contents[position + 1]), f"wrong state at {position} of group {group}"

    def _write_keys(self, group: int, blocks: list[int], contents: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            assert blocks[position // BLOCK_SIZE] != 0, "would write to the null block"
            self._arena[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = (group, contents[position + 1])

    def _take(self, group: int, blocks: list[int], contents: list[int], start: int) -> None:
        if start:
            held = self.read(blocks[(start - 1) // BLOCK_SIZE], BLOCK_SIZE)
            assert held == [(group, contents[start])] * BLOCK_SIZE, f"wrong state after {start} tokens, group {group}"

    def _put(self, group: int, blocks: list[int], contents: list[int], start: int, end: int) -> None:
        assert blocks[(end - 1) // BLOCK_SIZE] != 0, "the last state has no memory"
        for index in range(start // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
            if blocks[index]:
                after = contents[min(end, (index + 1) * BLOCK_SIZE)]
                self.write(blocks[index], [(group, after)] * BLOCK_SIZE)
