"""One request's text as it grows: tokens in, text that may be shown out, and whether a stop string was met."""

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
    """Detokenises incrementally and watches for stop strings, which count once `min_tokens` tokens exist."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_id: int) -> TextPiece:
        """The text that `token_id` completes."""
        self._num_tokens += 1
        text = self._detokenizer.add(token_id)
        if self._num_tokens < self._min_tokens:
            return TextPiece(self._stops.flush() + text)
        result = self._stops.add(text)
        return TextPiece(result.emit, result.matched)

    def flush(self) -> TextPiece:
        """The text that was held back, once no token follows."""
        result = self._stops.add(self._detokenizer.flush())
        if result.matched is not None:
            return TextPiece(result.emit, result.matched)
        return TextPiece(result.emit + self._stops.flush())
