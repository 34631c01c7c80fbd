"""Writes elements of Lark, llguidance's grammar language: literals, marks, JSON that matches a schema. Pure text.

Marks are the fixed texts around a model's tool calls and thinking, such as `<tool_call>`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.gateway.parsing.output import MAX_CALLS

# NOTE: what templates write between the members of a call, so what models were trained to write.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Lark:
    """Writes marks as grammar elements. `special_ids`: marks that are special tokens, which text cannot match."""

    special_ids: Mapping[str, int] = field(default_factory=dict)

    def is_special(self, mark: str) -> bool:
        return mark in self.special_ids

    def mark(self, mark: str) -> str:
        return f"<[{self.special_ids[mark]}]>" if mark in self.special_ids else literal(mark)


def literal(text: str) -> str:
    """A text as a quoted string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def up_to_limit(sequence: str) -> str:
    """Repeats `sequence` as often as the limit on calls in an answer allows after the first call."""
    return f"({sequence}){{0,{MAX_CALLS - 1}}}"


def choice(rule: str, alternatives: Sequence[str]) -> str:
    """A rule that matches one of `alternatives`."""
    return f"{rule}: " + "\n  | ".join(alternatives) + "\n"


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """A rule for JSON that matches a schema, which llguidance must be able to enforce."""
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}\n"
