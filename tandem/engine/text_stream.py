"""Text of one request as it grows: takes tokens, returns text that may be shown, and detects stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.core.sampling_params import SamplingParams
from tandem.text.detokenizer import IncrementalDetokenizer
from tandem.text.stop import StopStrings
from tandem.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Text to show now, and the stop string that ends the request, if one was met."""

    text: str
    matched: str | None = None


class TextStream:
    """Detokenises incrementally and looks for stop strings, which count once `min_tokens` tokens exist."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_id: int) -> TextPiece:
        """Take the next token; returns the text that it completes."""
        self._num_tokens += 1
        text = self._detokenizer.add(token_id)
        if self._num_tokens < self._min_tokens:
            return TextPiece(self._stops.flush() + text)
        result = self._stops.add(text)
        return TextPiece(result.emit, result.matched)

    def flush(self) -> TextPiece:
        """End the text; returns what was held back."""
        result = self._stops.add(self._detokenizer.flush())
        if result.matched is not None:
            return TextPiece(result.emit, result.matched)
        return TextPiece(result.emit + self._stops.flush())
