"""Answers drawn at random from what a grammar admits, by the masks that workers use."""

import ctypes
import random
from collections.abc import Sequence
from pathlib import Path

from tandem.text.grammars import Grammars
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import write_byte_tokenizer

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[THINK]", "[/THINK]")
_CLOSING = frozenset(b'"}])<')
_PLAIN = frozenset(b"abcXYZ012 {}[]()<>\"',:.-\\\n_=")


def byte_tokenizer(path: Path, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """A token a byte, and some that are special."""
    config = write_byte_tokenizer(path) / "tokenizer_config.json"
    listed = ", ".join(f'"{token}"' for token in special)
    config.write_text(config.read_text().removesuffix("}") + f', "additional_special_tokens": [{listed}]}}')
    return Tokenizer.load(path)


class Walker:
    """`grammars` must be closed by its owner."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars

    def answer(self, grammar: str, rng: random.Random, *, patience: int = 150) -> str:
        """One that ended where it may. After `patience` tokens it ends as soon as it can."""
        matcher = self._grammars.matcher(grammar)
        token_ids: list[int] = []
        for step in range(4000):
            allowed = self._allowed(matcher)
            ends = self._grammars.end_bit in allowed
            assert allowed, self._text(token_ids)
            if ends and (len(allowed) == 1 or step > patience or rng.random() < 0.1):
                return self._text(token_ids)
            token_ids.append(self._drawn(allowed - {self._grammars.end_bit}, rng, is_late=step > patience))
            assert matcher.consume(token_ids[-1:]), self._text(token_ids)
        raise AssertionError(f"no end of {self._text(token_ids)!r}")

    def admits(self, grammar: str, text: str) -> bool:
        """Whether it may be a whole answer."""
        matcher = self._grammars.matcher(grammar)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return matcher.consume(token_ids) and self._grammars.end_bit in self._allowed(matcher)

    def _allowed(self, matcher: object) -> frozenset[int]:
        row = bytearray(self._grammars.mask_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(row))
        self._grammars.fill_masks([(matcher, 0)], address, 1)  # type: ignore[list-item]
        assert getattr(matcher, "error", None) is None
        bits = int.from_bytes(row, "little")
        return frozenset(bit for bit in range(self._grammars.end_bit + 1) if bits >> bit & 1)

    def _drawn(self, allowed: frozenset[int], rng: random.Random, *, is_late: bool) -> int:
        closing = [token for token in allowed if self._byte(token) in _CLOSING]
        if closing and (is_late or rng.random() < 0.2):
            return rng.choice(sorted(closing))
        readable = [token for token in allowed if self._byte(token) is None or self._byte(token) in _PLAIN]
        return rng.choice(sorted(readable or allowed))

    def _byte(self, token_id: int) -> int | None:
        """None for special tokens."""
        if self._tokenizer.is_special(token_id):
            return None
        (byte,) = self._tokenizer.token_bytes(token_id)
        return byte

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
