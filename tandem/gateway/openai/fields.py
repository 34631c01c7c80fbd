"""Fields of OpenAI's request bodies, and a list of fields that are safe to ignore.

Invariant: a field that would change the answer is honoured or refused by name, never ignored. Fields that are ignored
only name, bill, store or speed up, or hold the value that means "nothing special".
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.errors import shown
from tandem.core.sampling_params import MAX_LIST_TOKENS
from tandem.core.scope import MAX_SALT_CHARACTERS
from tandem.core.speculate import DrafterChoice
from tandem.gateway.conversation import Effort
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_free_form
from tandem.gateway.parse import Entries, at_most, parse_body

# Names of further fields that are accepted with any value of bounded size, and ignored.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "prediction",
        "spaces_between_special_tokens",
        "request_id",
    }
)
# By name of a further field: the values with which it is accepted, beside null, because they ask for nothing.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    """`stream_options` of a request. None = not specified."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class PromptCacheOptions(_Body):
    """`prompt_cache_options` of a request. None = not specified."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class GenerateBody(_Body):
    """Common fields of chat and completions. None = not specified; ranges are checked by `SamplingParams`."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_LIST_TOKENS)] | None = None
    top_k: int | None = Field(None, description="0 or -1: all")
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Entries[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Entries[str] | None = None
    allowed_token_ids: Entries[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller is served first")
    cache_salt: str | None = Field(
        None,
        max_length=MAX_SALT_CHARACTERS,
        description="prompts share cached KV only within a salt; omitted: all of the tenant",
    )
    prompt_cache_key: str | None = Field(
        None, max_length=256, description="requests of one key prefer one worker; omitted: no preference"
    )
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    speculate: DrafterChoice | None = Field(
        None, description="off, auto or the worker's drafter of guessed tokens; no token depends on it; default auto"
    )
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, regex, choice, grammar; omitted: no constraint"
    )


class ChatBody(GenerateBody):
    """Body of `POST /v1/chat/completions`. None = not specified."""

    messages: Entries[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = Field(None, strict=False)
    documents: Entries[dict[str, Any]] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="the answer continues the last message; default false"
    )
    add_special_tokens: bool | None = Field(None, description="whether the template's text gets a bos; default false")


class CompletionBody(GenerateBody):
    """Body of `POST /v1/completions`. None = not specified."""

    prompt: str | Entries[int] | Entries[str] | Entries[Entries[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = Field(None, description="whether a text prompt gets a bos; default true")


AnyBody = TypeVar("AnyBody", bound=GenerateBody)


def read_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Parses and checks a body as `kind`.

    Raises:
        RequestError: it is not a JSON object, a field has the wrong type, or one cannot be honoured; it is named.
    """
    found = parse_body(kind, body)
    _check_extra(found.model_extra or {})
    if found.stream_options is not None and not found.stream:
        raise RequestError("stream_options is only for stream=true", param="stream_options")
    for name in ("stream_options", "prompt_cache_options"):
        _check_options(name, getattr(found, name, None))
    return found


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in HARMLESS:
            check_free_form({name: value}, name)
        elif value is not None and value not in HARMLESS_VALUES.get(name, ()):
            raise RequestError(
                f"{shown(name)[1:-1]}={shown(value)} is not supported by this server, and ignoring it would change the "
                "answer; leave it out",
                param=name[:128],
                code="unsupported_parameter",
            )


def _check_options(name: str, options: _Body | None) -> None:
    """Refuses members that are not known, unless they are null."""
    for member, value in ((options and options.model_extra) or {}).items():
        if value is not None:
            raise RequestError(f"{name} has no {shown(member)}", param=name, code="unknown_parameter")
