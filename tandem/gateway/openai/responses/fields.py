"""Fields of the bodies of `/v1/responses`, and a list of fields that are safe to ignore.

Invariant: a field that would change the answer is honoured or refused by name, never ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tandem.core.errors import shown
from tandem.gateway.conversation import Effort
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_free_form
from tandem.gateway.openai.fields import GenerateBody, PromptCacheOptions
from tandem.gateway.parse import Entries, at_most, parse_body

MAX_METADATA = 16  # entries of `metadata`
MAX_IDENTIFIER = 256  # characters of an identifier
# Names of further fields that are accepted with any value of bounded size, and ignored.
HARMLESS = frozenset(
    {
        "prompt_cache_retention",
        "max_tool_calls",
        "access_programs",
        "client_metadata",
        "image",
        "spaces_between_special_tokens",
        "request_id",
    }
)
# By name of a further field: the values with which it is accepted, beside null, because they ask for nothing.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "background_options": ({}, {"completion_window": "soonest"}),
    "best_of": (1,),
    "use_beam_search": (False,),
}
# Of chat and completions, and not of this API. None, or the value that asks for nothing, is accepted.
ELSEWHERE: Mapping[str, tuple[str, Any]] = {
    "max_tokens": ("send max_output_tokens", None),
    "response_format": ("send text.format", None),
    "n": ("one response has one answer; send several requests", 1),
    "prompt_logprobs": ("/v1/completions and /v1/chat/completions have it", None),
    "return_token_ids": ("/v1/completions and /v1/chat/completions have it", False),
}
INCLUDABLE = frozenset(
    {
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "message.input_image.image_url",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class ReasoningOptions(_Part):
    """`reasoning` of a request. None = not specified."""

    effort: Effort | None = Field(None, strict=False)
    summary: str | None = Field(None, description="accepted without effect: the thinking itself is returned")
    generate_summary: str | None = Field(None, description="accepted without effect, as summary")
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = Field(
        None, description="accepted without effect: the chat template decides which earlier thinking the model sees"
    )


class TextOptions(_Part):
    """`text` of a request: format of the answer. None = not specified."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesPromptBody(_Part):
    """Fields that determine the prompt; they suffice to count its tokens."""

    input: str | Entries[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="no input is cut, with either value: what does not fit the model is refused"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class InputTokensBody(ResponsesPromptBody):
    """Body of `POST /v1/responses/input_tokens`."""

    model: str | None = Field(None, description="the served name; omitted: the one model there is")


class ResponsesBody(ResponsesPromptBody, GenerateBody):
    """Body of `POST /v1/responses`. None = not specified."""

    store: bool | None = Field(None, description="default true")
    background: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31, description="omitted: what fits the model")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="likeliest tokens shown at each position; default 0"
    )
    include: Entries[str] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            at_most(MAX_METADATA),
        ]
        | None
    ) = Field(None, max_length=MAX_METADATA)
    user: str | None = Field(None, max_length=MAX_IDENTIFIER)
    safety_identifier: str | None = Field(None, max_length=MAX_IDENTIFIER)
    service_tier: str | None = None


AnyBody = TypeVar("AnyBody", bound=ResponsesPromptBody)


def read_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Parses and checks a body as `kind`.

    Raises:
        RequestError: it is not a JSON object, a field has the wrong type, or one cannot be honoured; it is named.
    """
    found = parse_body(kind, body)
    _check_extra(found.model_extra or {})
    for name in ("reasoning", "text", "prompt_cache_options"):
        _check_inner(name, getattr(found, name))
    if found.input is None and found.previous_response_id is None:
        raise RequestError("input is missing", param="input", code="missing_required_parameter")
    if isinstance(found, ResponsesBody):
        _check_options(found)
    return found


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in HARMLESS:
            check_free_form({name: value}, name)
        elif value is not None and value not in HARMLESS_VALUES.get(name, ()):
            raise _unsupported(name, value)


def _check_inner(name: str, value: BaseModel | None) -> None:
    for inner, given in ((value and value.model_extra) or {}).items():
        if given is not None and given is not False:
            raise _unsupported(f"{name}.{inner}", given, name)


def _check_options(body: ResponsesBody) -> None:
    for name, (remedy, nothing) in ELSEWHERE.items():
        value = getattr(body, name)
        if value is not None and value != nothing:
            raise RequestError(
                f"{name}={shown(value)} is not a field of this API: {remedy}", param=name, code="unsupported_parameter"
            )
    if body.background and body.store is False:
        raise RequestError("background=true needs store=true: there is no other way to get the answer", param="store")
    if body.background and body.stream:
        raise RequestError(
            "background=true with stream=true is not supported by this server; poll GET /v1/responses/{id} instead",
            param="background",
            code="unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only for stream=true", param="stream_options")
    _check_inner("stream_options", body.stream_options)
    unknown = next((value for value in body.include or () if value not in INCLUDABLE), None)
    if unknown is not None:
        raise RequestError(
            f"include holds {shown(unknown)}; it may hold {', '.join(sorted(INCLUDABLE))}", param="include"
        )


def _unsupported(name: str, value: Any, param: str | None = None) -> RequestError:
    return RequestError(
        f"{shown(name)[1:-1]}={shown(value)} is not supported by this server, and ignoring it would change the "
        "answer; leave it out",
        param=param or name[:128],
        code="unsupported_parameter",
    )
