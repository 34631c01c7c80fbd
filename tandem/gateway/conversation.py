"""A conversation as every dialect means it: messages a template takes, tools, and how the answer must be.

Plain values. Dialects translate their bodies into this; `assembly` turns it into tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. `parameters`: a JSON schema of its arguments. `strict`: they must match it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


class ToolMode(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the tools that may be called; none = all. `is_parallel`: whether one answer may hold several calls."""

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    is_parallel: bool = True


class FormatKind(StrEnum):
    """What `OutputFormat.value` is: a schema (object), a regex, a Lark grammar, or texts to choose from."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the answer must match."""

    kind: FormatKind
    value: Any = None


class Effort(StrEnum):
    """How much a model may think."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Thinking:
    """What was asked of thinking; None = nothing. `budget`: thinking tokens, which goes before `effort`'s."""

    effort: Effort | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Keep the KV of the prompt up to a place for `ttl_s` seconds.

    The place is the end of tool number `tool`, or after `offset` characters of the content of message number `message`.
    """

    ttl_s: float
    tool: int | None = None
    message: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the model reads and how it must answer.

    Args:
        messages: role, content and, where they have them, tool_calls (arguments as objects), tool_call_id, name and
            reasoning_content: the shape that templates of Hugging Face checkpoints take.
        variables: what else the template sees.
        documents: for templates that take them.
        breakpoints: in the order of their places.
        add_special_tokens: whether the template's text gets a bos.
        is_continued: the answer goes on with the last message, which is the assistant's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[Mapping[str, Any], ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()
    add_special_tokens: bool = False
    is_continued: bool = False
