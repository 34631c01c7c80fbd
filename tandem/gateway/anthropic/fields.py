"""Which fields Anthropic's bodies have, and which of those that we do not act on are harmless.

Invariant: a field that would change the answer is acted on or refused by name, never ignored. Harmless ones name, bill
or speed up. Cache breakpoints are among them: every prefix is cached without them, and usage says what was read.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.parse import parse_body

MAX_BREAKPOINTS = 4

# Accepted whatever they hold.
HARMLESS = frozenset({"metadata", "service_tier", "inference_geo", "speed"})
# Accepted with these values, which ask for nothing.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "mcp_servers": ([],),
    "stop_sequences": ([],),
    "output_config": ({},),
    "context_management": ({"edits": []},),
}


class CacheControl(BaseModel):
    """A breakpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class PromptBody(BaseModel):
    """What a prompt is made of; all that counting takes."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    cache_control: CacheControl | None = None


class MessagesBody(PromptBody):
    """None = not said; ranges are checked by `SamplingParams`."""

    max_tokens: int = Field(ge=0, description="0: only cache the prompt")
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0, description="0: all")
    seed: int | None = Field(None, description="same seed, same tokens")


AnyPrompt = TypeVar("AnyPrompt", bound=PromptBody)


def read_body(kind: type[AnyPrompt], body: bytes) -> AnyPrompt:
    """The body as `kind`.

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
        _check_harmless(name, value)
    return found


def _check_harmless(name: str, value: Any) -> None:
    if value is None or name in HARMLESS or value in HARMLESS_VALUES.get(name, ()):
        return
    if name == "output_config" and isinstance(value, dict) and value.keys() == {"effort"}:
        return  # NOTE: how long a model thinks; this one does not
    raise RequestError(
        f"{shown(name)[1:-1]}={shown(value)} is not supported by this server, and ignoring it would change the answer; "
        "leave it out",
        param=name[:128],
        code="unsupported_parameter",
    )
