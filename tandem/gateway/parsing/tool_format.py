"""The seam of a family's way to write tool calls: reading them and constraining them, from one description."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_rules import Callee, CallRules
from tandem.gateway.parsing.lark import Lark
from tandem.gateway.parts import AnswerParser


class ToolFormat(Protocol):
    """Plain values; safe to share."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts around calls, which may be special tokens."""
        ...

    def parser(self, tools: Sequence[Tool], ids: Iterator[str]) -> AnswerParser:
        """For one answer. A name that is not among `tools` is text."""
        ...

    def ids(self) -> Iterator[str]:
        """Call ids as this family's templates take them."""
        ...

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        """Calls to any of them. Raises InvalidRequestError for a schema that these calls cannot keep."""
        ...
