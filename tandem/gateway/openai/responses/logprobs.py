"""Logprobs of an answer's text tokens, in the format of the Responses API."""

from collections.abc import Sequence
from typing import Any

from tandem.core.reasoning import Reasoning, ReasoningState
from tandem.core.types import TokenLogprobs
from tandem.gateway.openai.logprobs import chat_logprobs
from tandem.text.tokenizer import Tokenizer


class TextLogprobs:
    """Formats logprobs of one answer without tool calls, leaving out tokens of thinking and its marks."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, reasoning: Reasoning | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._state = None if reasoning is None else ReasoningState(reasoning)

    def add(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Formats the logprobs of those of the next tokens that are text."""
        text = [entry for entry in entries if self._is_text(entry.token_id)]
        found: list[dict[str, Any]] = chat_logprobs(self._tokenizer, text, self._num_top)["content"]
        return found

    def _is_text(self, token_id: int) -> bool:
        if self._state is None or self._state.is_over:
            return True
        state, was_thinking = self._state, self._state.is_thinking
        state.observe(token_id)
        return bool(state.is_over) and not was_thinking
