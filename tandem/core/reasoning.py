"""Place of a model's thinking among its tokens, and its budget.

Invariant: a state that observed some tokens equals one built afresh that observes them again, so a request can move to
another worker. Thinking happens once, at the beginning of an answer.
"""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, shown

MAX_MARKER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer's thinking is marked.

    Args:
        start_token_ids: open it when the answer begins with them; none = only the prompt can open it.
        end_token_ids: close it; at least one.
        is_open: the prompt ends inside thinking.
        max_tokens: thinking tokens, markers not counted, after which `end_token_ids` are forced; None = any number.

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
    """Follows one answer. `num_tokens`: thinking tokens so far, markers not counted."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._may_open = bool(reasoning.start_token_ids) and not reasoning.is_open
        self._num_opening = 0  # tokens of the start marker seen
        self._num_closing = 0  # tokens of the end marker that the thinking ends with
        self.is_thinking = reasoning.is_open
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Whether all that follows is the answer itself."""
        return not self.is_thinking and not self._may_open

    @property
    def opening_token_id(self) -> int | None:
        """The token that would go on with, or complete, the marker that opens the thinking; None where it cannot."""
        return self._reasoning.start_token_ids[self._num_opening] if self._may_open else None

    @property
    def forced_token_id(self) -> int | None:
        """The next token, where the budget leaves no choice.

        NOTE: a marker that has begun counts as well, since it would be thought if it broke off.
        """
        budget = self._reasoning.max_tokens
        if not self.is_thinking or budget is None or self.num_tokens + self._num_closing < budget:
            return None
        return self._reasoning.end_token_ids[self._num_closing]

    def observe(self, token_id: int) -> None:
        """The next output token."""
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
        """NOTE: tokens of an end marker that breaks off were thoughts after all."""
        end = self._reasoning.end_token_ids
        before = [*end[: self._num_closing], token_id]
        closing = next(n for n in range(len(before), -1, -1) if before[len(before) - n :] == list(end[:n]))
        self.num_tokens += len(before) - closing
        self._num_closing = closing
        if closing == len(end):
            self.is_thinking = False
