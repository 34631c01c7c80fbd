"""Fields of Anthropic's request bodies, and a list of fields that are safe to ignore.

Invariant: a field that would change the answer is honoured or refused by name, never ignored. Fields that are ignored
only identify, bill, diagnose or speed up a request. All fields of the classes are Anthropic's, except `seed` and
`speculate`, which are Tandem's own.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.errors import shown
from tandem.core.speculate import DrafterChoice
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_free_form
from tandem.gateway.parse import Entries, parse_body

# Names of further fields that are accepted with any value of bounded size, and ignored.
HARMLESS = frozenset(
    {
        "metadata",
        "service_tier",
        "inference_geo",
        "speed",
        "diagnostics",
        "billing_policy",
        "user_profile_id",
        "workspace_id",
    }
)
# By name of a further field: the values with which it is accepted, beside null, because they ask for nothing.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "fallbacks": ([],)}


class MessagesPromptBody(BaseModel):
    """Fields that determine the prompt; they suffice to count its tokens."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    messages: Entries[dict[str, Any]]
    system: str | Entries[dict[str, Any]] | None = None
    tools: Entries[dict[str, Any]] | None = Field(default=None, description="name, description, input_schema, strict")
    tool_choice: dict[str, Any] | None = Field(default=None, description="type: auto, any, tool (with name) or none")
    thinking: dict[str, Any] | None = Field(
        default=None, description="type: enabled (with budget_tokens), adaptive or disabled"
    )
    output_config: dict[str, Any] | None = Field(default=None, description="effort: low to max; format: a JSON schema")
    output_format: dict[str, Any] | None = Field(default=None, description="the older name of output_config.format")
    context_management: dict[str, Any] | None = Field(default=None, description="edits of type clear_thinking_20251015")
    cache_control: dict[str, Any] | None = Field(default=None, description="a breakpoint after the last block")


class MessagesBody(MessagesPromptBody):
    """Body of `POST /v1/messages`. None = not specified; ranges are checked by `SamplingParams`."""

    max_tokens: int = Field(ge=0, description="0: only cache the prompt")
    stream: bool | None = None
    stop_sequences: Entries[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=0, description="0: all")
    seed: int | None = Field(default=None, description="the same seed gives the same tokens; omitted: a random one")
    speculate: DrafterChoice | None = Field(
        default=None,
        description="off, auto or the worker's drafter of guessed tokens; no token depends on it; default auto",
    )


AnyPrompt = TypeVar("AnyPrompt", bound=MessagesPromptBody)


def read_body(kind: type[AnyPrompt], body: bytes) -> AnyPrompt:
    """Parses and checks a body as `kind`.

    Raises:
        RequestError: it is not a JSON object, a field has the wrong type, or one cannot be honoured; it is named.
    """
    found = parse_body(kind, body)
    extra = found.model_extra or {}
    if extra.get("thread") is not None:
        raise RequestError(
            "thread is not supported by this server: send the whole conversation with each request",
            param="thread",
            code="thread_unsupported_request",
        )
    for name, value in extra.items():
        if name in HARMLESS:
            check_free_form({name: value}, name)
        elif value is not None and value not in HARMLESS_VALUES.get(name, ()):
            raise unsupported(shown(name)[1:-1], value)
    return found


def unsupported(where: str, value: Any) -> RequestError:
    """The refusal of a field that would change the answer and is not supported."""
    return RequestError(
        f"{where}={shown(value)} is not supported by this server, and ignoring it would change the answer; "
        "leave it out",
        param=where[:128],
        code="unsupported_parameter",
    )


def refuse_unknown(found: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raises RequestError for the first member of an object that is neither known nor null."""
    for name, value in found.items():
        if name not in known and value is not None:
            raise unsupported(f"{where}.{shown(name)[1:-1]}", value)
