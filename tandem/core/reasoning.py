"""Tracks a model's thinking within its output tokens, and enforces the thinking budget.

Invariant: the state depends only on the tokens observed, so it can be rebuilt when a request moves to another worker.
Thinking happens once, at the beginning of the output.
"""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, shown

MAX_MARKER_TOKENS = 64  # of a start or end marker


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Markers and budget of thinking.

    Args:
        start_token_ids: start marker at the beginning of the output; empty = only the prompt can start thinking.
        end_token_ids: end marker; at least one token.
        is_open: whether the prompt ends inside thinking.
        max_tokens: number of thinking tokens, without markers, after which the end marker is forced; None = no limit.

    Raises:
        InvalidRequestError: naming the value that cannot be honoured.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    is_open: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, ids, least in (("start", self.start_token_ids, 0), ("end", self.end_token_ids, 1)):
            object.__setattr__(self, f"{name}_token_ids", tuple(ids))
            if not least <= len(ids) <= MAX_MARKER_TOKENS or any(type(i) is not int or i < 0 for i in ids):
                raise InvalidRequestError(
                    f"reasoning.{name}_token_ids={shown(ids)} must be {least} to {MAX_MARKER_TOKENS} token ids"
                )
        if self.max_tokens is not None and (type(self.max_tokens) is not int or not 0 <= self.max_tokens < 2**31):
            raise InvalidRequestError(f"reasoning.max_tokens={shown(self.max_tokens)} must be an integer from 0 up")


class ReasoningState:
    """State of one output. `num_tokens`: number of thinking tokens so far, without markers."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._may_open = bool(reasoning.start_token_ids) and not reasoning.is_open
        self._num_opening = 0  # tokens of the start marker seen
        self._num_closing = 0  # tokens of the end marker that the thinking ends with
        self.is_thinking = reasoning.is_open
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Whether thinking has ended, so that all further tokens are the answer."""
        return not self.is_thinking and not self._may_open

    @property
    def opening_token_id(self) -> int | None:
        """The token that would continue or complete the start marker; None if thinking cannot start any more."""
        return self._reasoning.start_token_ids[self._num_opening] if self._may_open else None

    @property
    def forced_token_id(self) -> int | None:
        """The next token if the budget forces it, else None.

        NOTE: tokens of a partial end marker count as thinking, since they would be thinking if the marker broke off.
        """
        budget = self._reasoning.max_tokens
        if not self.is_thinking or budget is None or self.num_tokens + self._num_closing < budget:
            return None
        return self._reasoning.end_token_ids[self._num_closing]

    def observe(self, token_id: int) -> None:
        """Advance the state by the next output token."""
        if self.is_thinking:
            self._observe_thought(token_id)
        elif self._may_open:
            self._observe_opening(token_id)

    def _observe_opening(self, token_id: int) -> None:
        start = self._reasoning.start_token_ids
        self._may_open = start[self._num_opening] == token_id
        self._num_opening += 1
        if self._may_open and self._num_opening == len(start):
            self._may_open, self.is_thinking = False, True

    def _observe_thought(self, token_id: int) -> None:
        """NOTE: the tokens of an end marker that breaks off were thinking."""
        end = self._reasoning.end_token_ids
        before = [*end[: self._num_closing], token_id]
        closing = next(n for n in range(len(before), -1, -1) if before[len(before) - n :] == list(end[:n]))
        self.num_tokens += len(before) - closing
        self._num_closing = closing
        if closing == len(end):
            self.is_thinking = False
