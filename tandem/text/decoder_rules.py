"""Derives the bytes that each token adds to the text from the checkpoint's decoder, so that text can be streamed.

Invariant: for valid UTF-8, joining the bytes of all tokens of a sequence equals decoding it whole. A decoder whose
output depends on more than single tokens is refused, never approximated.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """Rules by which token strings become text. Read from the `decoder` of a tokenizer.json.

    Args:
        byte_level: characters stand for bytes (GPT-2).
        byte_fallback: "<0xNN>" stands for a byte (sentencepiece).
        replacements: pairs of a text and its substitute, applied to each token in order.
        separator: comes before each token but the first.
        stripped, num_stripped: removed at the start of the text, up to `num_stripped` times.
        first_token_drops: character of which every occurrence in the first token is removed instead; "" = none.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    separator: str = ""
    stripped: str = " "
    num_stripped: int = 0
    first_token_drops: str = ""

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> "DecoderRules":
        """Parses a decoder. Raises UnsupportedCheckpointError if its text cannot be streamed exactly."""
        if decoder is None:
            return cls(separator=" ", num_stripped=1)
        steps = [_Step.parse(step) for step in _flatten(decoder, 0)]
        rules = cls()
        for index, step in enumerate(steps):
            earlier = [before.kind for before in steps[:index]]
            rules = step.extend(rules, earlier)
        return rules

    @property
    def utf8_errors(self) -> str:
        """Python's error handler for undecodable bytes: replaces each byte (byte fallback) or each broken character."""
        return "surrogateescape" if self.byte_fallback else "replace"

    def piece(self, token: str) -> bytes:
        """The bytes of one token string that is not the first of a text."""
        if self.byte_level:
            return _byte_level_bytes(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes.fromhex(match[1]) if match else (self.separator + token).encode()

    def first_piece(self, token: str) -> bytes:
        """The bytes of the first token of a text, before `stripped` is removed."""
        return self.piece(token.replace(self.first_token_drops, "") if self.first_token_drops else token)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a tokenizer's decoder."""

    kind: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, value: Any) -> "_Step":
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise CorruptCheckpointError(f"tokenizer.json has a decoder step without a type: {value!r}")
        return cls(value["type"], value)

    def extend(self, rules: DecoderRules, earlier: Sequence[str]) -> DecoderRules:
        """`rules` with this step added; `earlier` are the kinds of the steps before it."""
        match self.kind:
            case "Fuse":
                return rules
            case "ByteLevel" if set(earlier) <= {"Fuse"}:
                return replace(rules, byte_level=True)
            case "Replace" if set(earlier) <= {"Replace"}:
                return replace(rules, replacements=(*rules.replacements, self._replacement()))
            case "ByteFallback" if set(earlier) <= {"Replace"}:
                return replace(rules, byte_fallback=True)
            case "Strip" if "Fuse" in earlier and "Strip" not in earlier and self.options.get("stop") == 0:
                return replace(rules, stripped=str(self.options["content"]), num_stripped=int(self.options["start"]))
            case "Metaspace" if not earlier:
                return self._metaspace(rules)
        raise UnsupportedCheckpointError(
            f"tokenizer.json's decoder step {dict(self.options)!r} after {list(earlier)} cannot be streamed exactly; "
            "ByteLevel, Metaspace, and Replace → ByteFallback → Fuse → Strip(stop=0) are supported"
        )

    def _replacement(self) -> tuple[str, str]:
        pattern = self.options.get("pattern")
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        if not isinstance(old, str) or not old:
            raise UnsupportedCheckpointError(
                f"tokenizer.json's decoder replaces the pattern {pattern!r}; only plain strings are supported"
            )
        return old, str(self.options["content"])

    def _metaspace(self, rules: DecoderRules) -> DecoderRules:
        mark = str(self.options.get("replacement", "▁"))
        drops = "" if self.options.get("prepend_scheme", "always") == "never" else mark
        return replace(rules, replacements=((mark, " "),), first_token_drops=drops)


def _flatten(decoder: Any, depth: int) -> list[Any]:
    if isinstance(decoder, Mapping) and decoder.get("type") == "Sequence" and depth < _MAX_DEPTH:
        return [step for inner in decoder.get("decoders", ()) for step in _flatten(inner, depth + 1)]
    return [decoder]


def _byte_of(character: str) -> int | None:
    """The byte that a character stands for in byte-level BPE (GPT-2's `bytes_to_unicode`, inverted), or None.

    Printable Latin-1 stands for itself; the other 68 bytes were moved, in order, to U+0100 and up.
    """
    code = ord(character)
    if 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xAC or 0xAE <= code <= 0xFF:
        return code
    moved = code - 0x100
    if 0 <= moved <= 0x20:
        return moved
    if 0x21 <= moved <= 0x42:
        return moved - 0x21 + 0x7F
    return 0xAD if moved == 0x43 else None


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with a character that stands for no byte (an added token) is taken literally."""
    values = [_byte_of(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()
