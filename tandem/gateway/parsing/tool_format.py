"""Interface of a model family's tool-call format: `answer_format` takes the parser of each answer from it, and
`answer_grammar` the grammar rules of its calls.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from tandem.gateway.conversation import Tool
from tandem.gateway.parsing.call_rules import Callee, CallRules
from tandem.gateway.parsing.lark import Lark
from tandem.gateway.parts import AnswerParser


class ToolFormat(Protocol):
    """The format of one family's calls. Immutable; safe to share."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts around calls; they may be special tokens."""
        ...

    def parser(self, tools: Sequence[Tool], ids: Iterator[str], used_ids: Collection[str] = ()) -> AnswerParser:
        """A parser for one answer. A call of a name that is not among `tools` is text. No call gets one of `used_ids`,
        or the id of another call of the answer.
        """
        ...

    def ids(self) -> Iterator[str]:
        """Call ids that this family's templates accept."""
        ...

    def rules(self, callees: Sequence[Callee], *, is_parallel: bool, lark: Lark) -> CallRules:
        """Grammar rules for calls of any callee. Raises InvalidRequestError for a schema that cannot be enforced."""
        ...
