"""Format of a model's tool calls and thinking: detected once, then used to parse answers and to constrain them.

Immutable and safe to share; each parser that it makes belongs to one answer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.reasoning import Reasoning
from tandem.gateway.conversation import Effort, OutputFormat, Tool, ToolChoice
from tandem.gateway.parsing.answer_grammar import answer_grammar
from tandem.gateway.parsing.effort import BUDGETS
from tandem.gateway.parsing.lark import Lark
from tandem.gateway.parsing.thinking import ThinkingFormat
from tandem.gateway.parsing.thinking_parser import ThinkingParser
from tandem.gateway.parsing.tool_format import ToolFormat
from tandem.gateway.parsing.tool_formats import find_tool_format
from tandem.gateway.parts import AnswerParser, CallsOnlyParser, PlainParser
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The detected format.

    Args:
        tools: None = the model cannot call tools.
        thinking: None = the model does not think.
        lark: knows which of their marks are special tokens.
    """

    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None
    lark: Lark = field(default_factory=Lark)

    @classmethod
    def detect(
        cls,
        template: str | None,
        tokenizer: Tokenizer,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        budgets: Mapping[Effort, int | None] = BUDGETS,
    ) -> "AnswerFormat":
        """Detects the format from the chat template and the tokenizer.

        Args:
            template: the chat template's source.
            tool_parser: auto, none or a format's name.
            reasoning_parser: auto, none, a format's name, or `START,END`.

        Raises:
            ConfigurationError: a parser's name is not known.
        """
        tools = find_tool_format(template, tool_parser)
        thinking = ThinkingFormat.detect(template, tokenizer, reasoning_parser, budgets)
        marks = [*(tools.markers if tools else ()), *((thinking.start, thinking.end) if thinking else ())]
        ids = {mark: tokenizer.token_id(mark) for mark in marks}
        special = {mark: token for mark, token in ids.items() if token is not None and tokenizer.is_special(token)}
        return cls(tools, thinking, Lark(special))

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a mark is a special token, so that special tokens must not be skipped in the text."""
        return bool(self.lark.special_ids)

    def parser(
        self,
        *,
        tools: Sequence[Tool],
        is_thinking_open: bool,
        used_ids: Collection[str] = (),
        is_forced: bool = False,
    ) -> AnswerParser:
        """A parser for one answer. `tools`: those it may call; `used_ids`: ids of earlier calls; `is_forced`: its
        grammar admits only calls.
        """
        inner: AnswerParser = PlainParser()
        if self.tools is not None and tools:
            inner = self.tools.parser(tools, self.tools.ids(), used_ids)
            inner = CallsOnlyParser(inner) if is_forced else inner
        if self.thinking is None:
            return inner
        return ThinkingParser(self.thinking.start, self.thinking.end, inner, is_open=is_thinking_open)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, output: OutputFormat | None, free: Collection[str] = ()
    ) -> str | None:
        """The grammar of the text after thinking, for llguidance; None = unconstrained.

        Args:
            free: names of non-strict tools whose schemas are not enforced.

        Raises:
            InvalidRequestError: a call is required of a model that makes none, or a tool's parameters cannot be
                enforced.
        """
        may_think = self.thinking is not None
        return answer_grammar(self.tools, self.lark, tools, choice, output, may_think=may_think, free=free)

    def reasoning(self, tokenizer: Tokenizer, *, is_open: bool, budget: int | None) -> Reasoning | None:
        """Rule that detects thinking among tokens; None without thinking, or if its marks are no unique tokens."""
        return None if self.thinking is None else self.thinking.reasoning(tokenizer, is_open=is_open, budget=budget)
