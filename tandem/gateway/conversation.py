"""A conversation, independent of the API: messages for the chat template, tools, and constraints on the answer.

Plain values. Dialects translate their bodies into this; `assembly` turns it into tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

# Stands for a message of a known beginning (`known_conversations`), which was not parsed again.
UNREAD: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. `parameters`: a JSON schema of its arguments. `strict`: they must match it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


class ToolMode(StrEnum):
    """Whether the model may not, may, or must call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Constraint on tool calls. `names`: callable tools; empty = all. `is_parallel`: several in one answer."""

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    is_parallel: bool = True


class FormatKind(StrEnum):
    """Kind of an output format. Its value is a JSON schema, nothing (any JSON object), a regex, texts, or Lark."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A format that the answer must match. `where`: the request's field that gives it, for errors."""

    kind: FormatKind
    value: Any = None
    where: str = field(default="", compare=False)


class Effort(StrEnum):
    """Amount of thinking requested."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thinking requested by the client; None = not specified. `budget`: thinking tokens, overriding `effort`."""

    effort: Effort | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A cache breakpoint: keep the KV of the prompt up to this place for `ttl_s` seconds.

    Args:
        tool: number of the tool at whose end it is; None: it is in a message.
        message: number of the message in which it is, after `offset` characters of the content; None: it is at a tool.
    """

    ttl_s: float
    tool: int | None = None
    message: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Input of the model, and the constraints on its answer.

    Args:
        messages: role, content and, where they have them, tool_calls (arguments as objects), tool_call_id, name and
            reasoning_content, or `UNREAD`: the shape that templates of Hugging Face checkpoints take.
        variables: further variables of the template.
        documents: for templates that take them.
        breakpoints: in the order of their places.
        call_ids: ids of its calls, which no call of the answer gets again.
        add_special_tokens: whether the tokenizer adds special tokens, such as a bos, to the rendered text.
        is_continued: the answer continues the last message, which is the assistant's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[Mapping[str, Any], ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()
    call_ids: Collection[str] = ()
    add_special_tokens: bool = False
    is_continued: bool = False
