"""Constraint of one answer: the tokens that its grammar and its thinking budget allow next.

Invariant: a constraint that observed some tokens equals one built afresh that observes them again. The grammar begins
where the thinking ends. Masks, which say what the grammar allows, are made by `MaskMaker`. It alone moves the matcher,
the object that follows an answer through its grammar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.core.reasoning import ReasoningState
from tandem.core.sampling_params import SamplingParams
from tandem.text.grammars import GrammarMatcher, Grammars

_BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class Mask:
    """Tokens that the grammar allows next. `ban`: excludes all others in a row of logits, in place.

    Args:
        may_end, must_end: whether the answer can end here, and whether nothing but its end can follow.
        error: reason why the grammar cannot go on.
    """

    ban: Callable[[torch.Tensor], None]
    may_end: bool
    must_end: bool
    error: str | None = None


class Constraint:
    """Constraint of one answer by grammar, thinking budget or both. `end_ids`: int64, tokens that end the answer."""

    def __init__(self, params: SamplingParams, end_ids: torch.Tensor) -> None:
        self._grammar = params.grammar
        self._reasoning = None if params.reasoning is None else ReasoningState(params.reasoning)
        self._end_ids = end_ids
        self._matcher: GrammarMatcher | None = None
        self._unread: list[int] = []  # the answer's tokens that the matcher has not passed
        self._matches = True
        self._mask: Mask | None = None

    @classmethod
    def create(cls, params: SamplingParams, end_ids: torch.Tensor) -> "Constraint | None":
        """The constraint that these parameters ask for; None if they ask for none."""
        return cls(params, end_ids) if params.grammar is not None or params.reasoning is not None else None

    @property
    def applies(self) -> bool:
        """Whether `apply` could change anything for the next token."""
        return self._grammar is not None or self._forced is not None

    @property
    def wants_mask(self) -> bool:
        """Whether a mask must be made before the next token is chosen."""
        return self._grammar is not None and self._mask is None and not self._is_thinking and self._forced is None

    @property
    def error(self) -> str | None:
        """Reason why the grammar allows no token at all; None = it allows some."""
        return None if self._mask is None else self._mask.error

    @property
    def must_end(self) -> bool:
        """Whether the grammar allows nothing but the end of the answer."""
        return self._mask is not None and self._mask.must_end

    @property
    def _is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def _forced(self) -> int | None:
        return None if self._reasoning is None else self._reasoning.forced_token_id

    @property
    def _opening(self) -> int | None:
        return None if self._reasoning is None else self._reasoning.opening_token_id

    def observe(self, token_id: int) -> None:
        """Record the next output token. The mask that `take` accepted is used up."""
        self._mask = None
        was_thinking = self._is_thinking
        if self._reasoning is not None:
            self._reasoning.observe(token_id)
        if self._grammar is None or was_thinking:
            return
        if self._is_thinking:  # it has just begun, so what was read of it is no answer
            self._matcher, self._unread, self._matches = None, [], True
        else:
            self._unread.append(token_id)

    def advance(self, grammars: Grammars) -> GrammarMatcher | None:
        """The matcher, after the tokens observed so far; None if these do not match the grammar. Called on the mask
        thread only.

        Raises:
            InvalidRequestError, CapacityError: as `Grammars.matcher`.
        """
        assert self._grammar is not None
        if self._matcher is None:
            self._matcher = grammars.matcher(self._grammar)
        unread, self._unread = self._unread, []
        self._matches = self._matches and self._matcher.consume(unread)
        return self._matcher if self._matches else None

    def take(self, mask: Mask) -> None:
        """Accept the mask for the next token."""
        self._mask = mask

    def apply(self, row: torch.Tensor) -> None:
        """Ban the tokens that must not come next, in place, by setting their logits to minus infinity. `row`: float32
        [vocab_size].
        """
        if self._forced is not None:
            row.fill_(_BANNED)
            row[self._forced] = 0.0
        elif self._grammar is not None and self._is_thinking:
            row[self._end_ids.to(row.device)] = _BANNED  # NOTE: the answer must come to where its grammar begins
        elif self._grammar is not None:
            self._apply_mask(row)

    def _apply_mask(self, row: torch.Tensor) -> None:
        mask = self._mask
        assert mask is not None, "a mask was to be made before the sampling"
        allowed_ids = self._allowed_ids(mask).to(row.device)
        kept = row[allowed_ids]
        mask.ban(row)
        row[allowed_ids] = kept

    def _allowed_ids(self, mask: Mask) -> torch.Tensor:
        """Tokens allowed although they are no text of the grammar: ends of the answer, and the marker that opens
        thinking.
        """
        parts = [self._end_ids] if mask.may_end else []
        if self._opening is not None:
            parts.append(torch.tensor([self._opening]))
        return torch.cat(parts) if parts else self._end_ids[:0]


def constraints_of(holders: Sequence[Constraint | None]) -> list[Constraint]:
    """The constraints among `holders` that need a mask."""
    return [constraint for constraint in holders if constraint is not None and constraint.wants_mask]
