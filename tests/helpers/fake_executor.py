"""An executor without a model: a token is a pure function of (request seed, position), whatever came before.

Given a layout it also keeps a pretend arena: every computed position writes what its KV would stand for, and every
step first proves that all positions its queries see hold exactly that. So a block reused too early is caught when read.
`FakeExecutor.write` and `read` stand for transfers, which touch blocks whenever they like.
"""

from collections.abc import Sequence

from tandem.core.types import FinishReason
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import ExecutorOutput, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.scheduler.request import Request

VOCAB_SIZE = 97
Content = tuple[int, int]  # KV group, what a position's KV stands for


def fake_token(seed: int, position: int) -> int:
    """The token at `position` of a request with this seed."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) % VOCAB_SIZE


def fake_answer(request: Request) -> tuple[list[int], FinishReason]:
    """What the request must produce when nothing ends it early: its tokens and why it ends."""
    tokens: list[int] = []
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= request.eos_token_ids
    while True:
        tokens.append(fake_token(request.seed, request.num_prompt_tokens + len(tokens)))
        if len(tokens) >= request.params.min_tokens and tokens[-1] in stops:
            return tokens, FinishReason.STOP
        if len(tokens) == request.max_tokens:
            return tokens, FinishReason.LENGTH


def kv_of(hash_root: bytes, token_ids: Sequence[int], group: int) -> list[Content]:
    """What the KV of each token would stand for: everything before it, and itself."""
    contents = [hash(hash_root)]
    for token_id in token_ids:
        contents.append(hash((contents[-1], token_id)))
    return [(group, content) for content in contents[1:]]


class FakeExecutor:
    """Implements `Executor`. `num_computed_tokens` counts every position it was ever told to compute.

    Args:
        layout: its KV groups; None computes tokens only.
        failing: ids of requests for which no token can be chosen.
    """

    def __init__(self, layout: KVLayout | None = None, failing: frozenset[str] = frozenset()) -> None:
        self.num_computed_tokens = 0
        self._layout = layout
        self._failing = failing
        self._arena: dict[tuple[int, int], tuple[int, int]] = {}
        self._contents: dict[str, list[int]] = {}

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        for request_id in step.released:
            self._contents.pop(request_id, None)
        if self._layout is not None:
            for item in step.scheduled:
                self._compute(item, self._layout)
        self.num_computed_tokens += step.num_tokens
        return ExecutorOutput(
            {item.request.request_id: self._sample(item) for item in step.scheduled if item.samples}, {}
        )

    def write(self, block_id: int, content: Sequence[Content | None]) -> None:
        """A transfer fills a block; None leaves what is there."""
        for offset, held in enumerate(content):
            if held is not None:
                self._arena[block_id, offset] = held

    def read(self, block_id: int, block_size: int) -> list[Content | None]:
        """What a block holds, token by token."""
        return [self._arena.get((block_id, offset)) for offset in range(block_size)]

    def _sample(self, item: ScheduledRequest) -> SampledToken:
        if item.request.request_id in self._failing:
            return SampledToken(0, error="nothing can be chosen")
        return SampledToken(fake_token(item.request.seed, item.end))

    def _compute(self, item: ScheduledRequest, layout: KVLayout) -> None:
        contents = self._contents.setdefault(item.request.request_id, [hash(item.request.hash_root)])
        for token_id in item.request.token_ids[len(contents) - 1 : item.end]:
            contents.append(hash((contents[-1], token_id)))
        start, size = item.request.num_computed_tokens, layout.block_size
        for group, blocks in enumerate(item.block_table.groups):
            for position in range(layout.groups[group].spec.needed(start), start):
                held = self._arena.get((blocks[position // size], position % size))
                assert held == (group, contents[position + 1]), f"{item.request.request_id}: wrong KV at {position}"
        for group, blocks in enumerate(item.block_table.groups):
            for position in range(start, item.end):
                assert blocks[position // size] != 0, f"{item.request.request_id}: would write to the null block"
                self._arena[blocks[position // size], position % size] = (group, contents[position + 1])
