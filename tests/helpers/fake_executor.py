"""An executor without a model: a token is a pure function of (request seed, position), whatever came before.

Given a layout it also keeps a pretend arena: every computed position writes what its KV would stand for, and every
step first proves that all positions its queries see hold exactly that. So a block reused too early is caught when read.
`FakeExecutor.write` and `read` stand for transfers, which touch blocks whenever they like.
"""

import random
from collections.abc import Sequence

from tandem.core.types import FinishReason
from tandem.engine.executor import FinishedStep
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import ExecutorOutput, NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.scheduler.request import Request

VOCAB_SIZE = 97
Content = tuple[int, int]  # KV group, what a position's KV stands for


def fake_token(seed: int, position: int) -> int:
    """The token at `position` of a request with this seed."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) % VOCAB_SIZE


def fake_answer(request: Request) -> tuple[list[int], FinishReason]:
    """Tokens that the request must produce when nothing ends it early, and the reason for its end."""
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
    """Content that the KV of each token would stand for: everything before it, and itself."""
    contents = [hash(hash_root)]
    for token_id in token_ids:
        contents.append(hash((contents[-1], token_id)))
    return [(group, content) for content in contents[1:]]


class FakeExecutor:
    """Implements `Executor`. `num_computed_tokens` counts every position it was ever told to compute.

    Args:
        layout: its KV groups; None computes tokens only.
        failing: ids of requests for which no token can be chosen.
        acceptance: probability that a draft is right; None drafts nothing.
    """

    def __init__(
        self, layout: KVLayout | None = None, failing: frozenset[str] = frozenset(), acceptance: float | None = None
    ) -> None:
        self.num_computed_tokens = 0
        self._layout = layout
        self._failing = failing
        self._arena: dict[tuple[int, int], tuple[int, int]] = {}
        self._known: dict[str, _Known] = {}
        self._acceptance = acceptance
        self._random = random.Random(0)

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        for request_id in step.released:
            self._known.pop(request_id, None)
        for request in step.new:
            self._known[request.request_id] = _Known(request, self._layout)
        for item in step.scheduled:
            self._compute(item)
        self.num_computed_tokens += step.num_tokens
        sampling = [item for item in step.scheduled if item.samples]
        sampled = {item.request_id: self._sample(item) for item in sampling}
        drafts = {} if self._acceptance is None else {item.request_id: self._draft(item) for item in sampling}
        return FinishedStep(ExecutorOutput(sampled, {}, drafts))

    def write(self, block_id: int, content: Sequence[Content | None]) -> None:
        """A transfer fills a block; None leaves what is there."""
        for offset, held in enumerate(content):
            if held is not None:
                self._arena[block_id, offset] = held

    def read(self, block_id: int, block_size: int) -> list[Content | None]:
        """Content of a block, token by token."""
        return [self._arena.get((block_id, offset)) for offset in range(block_size)]

    def _sample(self, item: ScheduledRequest) -> list[SampledToken]:
        if item.request_id in self._failing:
            return [SampledToken(0, error="nothing can be chosen")]
        known, position = self._known[item.request_id], item.end - item.num_drafts
        tokens = [fake_token(known.seed, position)]
        for draft in item.draft_token_ids:
            if draft != tokens[-1]:
                break
            tokens.append(fake_token(known.seed, position + len(tokens)))
        known.end = position + len(tokens)
        del known.contents[known.end :]  # NOTE: the KV of wrong drafts stays in the arena, and must never be read
        return [SampledToken(token) for token in tokens]

    def _draft(self, item: ScheduledRequest) -> list[int]:
        assert self._acceptance is not None
        known = self._known[item.request_id]
        right = [fake_token(known.seed, known.end + index) for index in range(self._random.randrange(7))]
        return [token if self._random.random() < self._acceptance else (token + 1) % VOCAB_SIZE for token in right]

    def _compute(self, item: ScheduledRequest) -> None:
        known = self._known[item.request_id]
        if self._layout is None:
            return
        known.take(item)
        size = self._layout.block_size
        for group, blocks in enumerate(known.tables):
            for position in range(self._layout.groups[group].spec.needed(item.start), item.start):
                held = self._arena.get((blocks[position // size], position % size))
                assert held == (group, known.contents[position + 1]), f"{item.request_id}: wrong KV at {position}"
        for group, blocks in enumerate(known.tables):
            for position in range(item.start, item.end):
                assert blocks[position // size] != NULL_BLOCK, f"{item.request_id}: would write to the null block"
                self._arena[blocks[position // size], position % size] = (group, known.contents[position + 1])


class _Known:
    """Record of one request: its tokens, as the contents that their KV stands for, and its block tables."""

    def __init__(self, request: NewRequest, layout: KVLayout | None) -> None:
        self.seed = request.seed
        self.end = 0
        self.contents = [hash(request.hash_root)]
        self.tables: list[list[int]] = [[] for _ in layout.groups] if layout is not None else []
        self._append((*request.prompt_token_ids, *request.output_token_ids))

    def take(self, item: ScheduledRequest) -> None:
        """Tokens and blocks that came with a step; those that were known before must be the same again."""
        num_known = len(self.contents) - 1 - item.start
        for position, token_id in enumerate(item.token_ids[:num_known], item.start):
            expected = hash((self.contents[position], token_id))
            assert self.contents[position + 1] == expected, f"{item.request_id}: another token at {position}"
        self._append(item.token_ids[num_known:])
        if item.blocks is not None:
            for table, added, num_dropped in zip(self.tables, item.blocks.added, item.blocks.num_dropped, strict=True):
                table += added
                table[:num_dropped] = [NULL_BLOCK] * num_dropped

    def _append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.contents.append(hash((self.contents[-1], token_id)))
