"""Decodes the output tokens of one request to text, one token at a time.

Invariant: the returned texts joined equal what decoding prompt and output together adds to the prompt's text, and none
ends inside a character. Work and memory per token do not depend on how many came before.
"""

import codecs
import re
from collections.abc import Sequence

from tandem.text.decoder_rules import DecoderRules
from tandem.text.tokenizer import Tokenizer

_NUM_CONTEXT_TOKENS = 8  # a character has at most four bytes, so the last few tokens decide its state
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class IncrementalDetokenizer:
    """Decodes output tokens as they arrive. At most the three bytes of an unfinished character are held back.

    Bytes that are no UTF-8 become U+FFFD: for byte-fallback vocabularies one for each byte, and characters already
    complete stay, where decoding the whole at once would give up the entire run of byte tokens around a broken one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _Utf8Stream(tokenizer.rules)
        self._at_start = True
        self._num_to_strip = tokenizer.rules.num_stripped
        self._enter(prompt_token_ids)

    def add(self, token_id: int) -> str:
        """The new text that `token_id` completes; may be empty."""
        return self._strip(self._utf8.add(self._piece(token_id)))

    def flush(self) -> str:
        """The text held back, when no token follows: U+FFFD for an unfinished character."""
        return self._strip(self._utf8.flush())

    def _piece(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        if not self._at_start:
            return self._tokenizer.token_bytes(token_id)
        token = self._tokenizer.token(token_id)
        if token is None:
            return b""
        self._at_start = False
        return self._tokenizer.rules.first_piece(token)

    def _strip(self, text: str) -> str:
        """Removes what the decoder strips at the very start of a text."""
        if not self._num_to_strip:
            return text
        stripped = self._tokenizer.rules.stripped
        while self._num_to_strip and text:
            if not text.startswith(stripped):
                self._num_to_strip = 0
            else:
                text = text[len(stripped) :]
                self._num_to_strip -= 1
        return text

    def _enter(self, prompt_token_ids: Sequence[int]) -> None:
        """Sets the state after the prompt: whether its text has begun, and its unfinished character."""
        num_read = 0
        while num_read < len(prompt_token_ids) and (self._at_start or self._num_to_strip):
            self.add(prompt_token_ids[num_read])
            num_read += 1
        for token_id in self._last_visible(prompt_token_ids[num_read:]):
            self.add(token_id)

    def _last_visible(self, token_ids: Sequence[int]) -> list[int]:
        """The last few of `token_ids` that add text, in order."""
        found: list[int] = []
        for token_id in reversed(token_ids):
            if self._tokenizer.token_bytes(token_id) and not (
                self._skip_special_tokens and self._tokenizer.is_special(token_id)
            ):
                found.append(token_id)
            if len(found) == _NUM_CONTEXT_TOKENS:
                break
        return found[::-1]


class _Utf8Stream:
    """Bytes to text, a chunk at a time; the bytes of an unfinished character wait for the next chunk."""

    def __init__(self, rules: DecoderRules) -> None:
        self._errors = rules.utf8_errors
        self._held = b""

    def add(self, chunk: bytes) -> str:
        if not self._held and chunk.isascii():
            return chunk.decode("ascii")
        return self._decode(chunk, final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, chunk: bytes, *, final: bool) -> str:
        waiting = self._held + chunk
        text, num_used = codecs.utf_8_decode(waiting, self._errors, final)
        self._held = waiting[num_used:]
        return _ESCAPED_BYTE.sub("\ufffd", text)
