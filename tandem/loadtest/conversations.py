"""Conversations of a load test, generated from lengths and seeds or recorded in a trace. `driver` decides their times.

Invariant: the same seed generates the same conversations, in whatever order and however late they are requested.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from tandem.loadtest.load_request import LoadRequest
from tandem.loadtest.plan import LoadPlan
from tandem.loadtest.token_text import Tokens, TokenSource
from tandem.workload.arrivals import spread_in_ticks
from tandem.workload.trace import MOONCAKE_BLOCK_SIZE, TraceRequest, read_trace


class RequestSequence(Protocol):
    """The requests of one conversation, one after the other."""

    def next_request(self, answer: Sequence[int]) -> LoadRequest | None:
        """The next request, given the answer to the last one (empty before the first); None: there is none."""
        ...


class GeneratedConversation:
    """A generated conversation with turns of random lengths; each prompt is the whole history and new tokens."""

    def __init__(self, plan: LoadPlan, tokens: TokenSource, number: int, max_model_len: int | None) -> None:
        self._plan = plan
        self._tokens = tokens
        self._number = number
        self._max_model_len = max_model_len
        self._random = random.Random(f"{plan.seed}/conversation/{number}")
        self._num_turns = plan.turns.draw(self._random)
        self._turn = 0
        self._history = Tokens()

    def next_request(self, answer: Sequence[int]) -> LoadRequest | None:
        """The next request; the conversation ends before it exceeds the model's context."""
        if self._turn == self._num_turns:
            return None
        answered = Tokens(b",".join(b"%d" % token_id for token_id in answer), len(answer))
        prompt = self._history + answered + self._new()
        request = LoadRequest(prompt, self._plan.output_lengths.draw(self._random), self._turn)
        if self._turn and self._max_model_len and prompt.count + request.num_output_tokens > self._max_model_len:
            return None
        self._history = prompt
        self._turn += 1
        return request

    def _new(self) -> Tokens:
        count = self._plan.prompt_lengths.draw(self._random)
        name = f"conversation {self._number} turn {self._turn}"
        if self._turn:
            return self._tokens.draw(name, count)
        num_shared = round(count * self._plan.shared_prefix_share)
        which = self._random.randrange(self._plan.num_prefixes)
        return self._tokens.block(f"prefix {which}", num_shared) + self._tokens.draw(name, count - num_shared)


class RecordedConversation:
    """One recorded request of a trace. Equal block ids become equal tokens.

    Args:
        scale: factor for token counts; blocks are scaled with prompts, so that shared prefixes stay shared.
    """

    def __init__(self, request: TraceRequest, tokens: TokenSource, number: int, scale: float) -> None:
        self._request: LoadRequest | None = LoadRequest(
            _prompt(request, tokens, number, scale), max(1, round(request.num_output_tokens * scale))
        )

    def next_request(self, answer: Sequence[int]) -> LoadRequest | None:
        request, self._request = self._request, None
        return request


def recorded_requests(plan: LoadPlan) -> Iterator[TraceRequest]:
    """The requests of the plan's trace, on its time scale. Arrivals recorded in coarse ticks are spread within them.

    Raises:
        InvalidRequestError: the trace cannot be read.
    """
    assert plan.arrivals.trace is not None
    requests = read_trace(plan.arrivals.trace)
    if plan.arrivals.trace.suffix == ".jsonl":
        requests = spread_in_ticks(requests, random.Random(f"{plan.seed}/ticks"))
    return (replace(request, arrival_s=request.arrival_s * plan.arrivals.time_scale) for request in requests)


def _prompt(request: TraceRequest, tokens: TokenSource, number: int, scale: float) -> Tokens:
    if not request.block_ids:
        return tokens.draw(f"request {number}", max(1, round(request.num_prompt_tokens * scale)))
    size = max(1, round(MOONCAKE_BLOCK_SIZE * scale))
    num_in_last = request.num_prompt_tokens - MOONCAKE_BLOCK_SIZE * (len(request.block_ids) - 1)
    last = max(1, min(size, round(num_in_last * scale)))
    *whole, tail = request.block_ids
    blocks = [tokens.block(f"block {block_id}", size) for block_id in whole]
    blocks.append(tokens.block(f"block {tail}", last))
    return Tokens(b",".join([block.text for block in blocks]), sum(block.count for block in blocks))
