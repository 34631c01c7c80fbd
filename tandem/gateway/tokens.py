"""HTTP routes of vLLM's tokenizer API: `/tokenize`, `/detokenize`, `/tokenizer_info` and `/ping`.

Invariant: token ids equal those with which the same prompt or chat is served. Contacts no worker; long texts never
delay streams.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tandem.core.errors import shown
from tandem.core.scope import UNSCOPED
from tandem.gateway.accounts import caller_of
from tandem.gateway.answer import JSON
from tandem.gateway.assembly import assemble
from tandem.gateway.body import ClientLeftError
from tandem.gateway.conversation import Conversation
from tandem.gateway.dialect import DialectContext, Isolate
from tandem.gateway.errors import RequestError
from tandem.gateway.gateway import Gateway
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.chat import template_variables
from tandem.gateway.openai.messages import MessageReader
from tandem.gateway.openai.tools import read_tools
from tandem.gateway.openapi import body_schema
from tandem.gateway.parse import Entries, parse_body
from tandem.gateway.prompt_encoder import LONG_TEXT
from tandem.rpc.messages import ModelInfo

MAX_TOKEN_STRINGS = 65_536  # that one answer of /tokenize may have
_CLIENT_LEFT = 499
_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {"continue_final_message": (False,), "mm_processor_kwargs": ({},)}
_CHAT_ONLY = ("add_generation_prompt", "chat_template_kwargs", "tools")

Reader = Callable[[bytes, DialectContext, Isolate], Awaitable[bytes]]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = Field(None, description="the served name; omitted: the one model there is")


class TokenizeBody(_Body):
    """A prompt or a chat, not both."""

    prompt: str | None = None
    messages: Entries[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for a chat")
    return_token_strs: bool | None = Field(None, description="the tokens as the vocabulary spells them, too")
    add_generation_prompt: bool | None = Field(None, description="of a chat; default true")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Entries[dict[str, Any]] | None = None


class DetokenizeBody(_Body):
    """Body of `POST /detokenize`."""

    tokens: Entries[int]


AnyTokens = TypeVar("AnyTokens", TokenizeBody, DetokenizeBody)
T = TypeVar("T")


def add_tokens(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody), tags=["tokens"])
    async def tokenize_text(request: Request) -> Response:
        """Token ids of a prompt or a chat."""
        return await _answered(request, gateway, tokenize)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody), tags=["tokens"])
    async def detokenize_ids(request: Request) -> Response:
        """Text of token ids, including special tokens."""
        return await _answered(request, gateway, detokenize)

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info() -> Response:
        """Description of the tokenizer, for clients that render chats themselves."""
        return Response(orjson.dumps(describe(gateway.model, gateway.model_info.known)), media_type=JSON)

    @app.get("/ping", tags=["operations"])
    async def ping() -> Response:
        """Whether this process is alive."""
        return Response(b"{}", media_type=JSON)

    app.post("/ping", tags=["operations"], name="ping_by_post")(ping)


async def tokenize(body: bytes, context: DialectContext, isolate: Isolate) -> bytes:
    """The body of `/tokenize`; texts longer than the context are counted too.

    Raises:
        InvalidRequestError: naming the field that is wrong.
        UnavailableError: no worker is known.
    """
    asked = await context.off_loop.run(len(body), partial(_read, TokenizeBody, body, context.model))
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="missing_required_parameter")
    info = await context.model_info.get()
    if asked.prompt is None:
        token_ids = await _of_chat(asked, context, info, isolate)
    else:
        token_ids = await _of_prompt(asked, asked.prompt, context.model, info)

    def answered() -> bytes:
        strings = _strings(context.model, token_ids) if asked.return_token_strs else None
        value = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids}
        return orjson.dumps(value | {"token_strs": strings})

    return await _off_loop(len(token_ids), answered)


async def detokenize(body: bytes, context: DialectContext, isolate: Isolate) -> bytes:
    """The body of `/detokenize`; raises as `tokenize`."""
    asked = await context.off_loop.run(len(body), partial(_read, DetokenizeBody, body, context.model))
    info = await context.model_info.get()

    def answered() -> bytes:
        wrong = next((token_id for token_id in asked.tokens if not 0 <= token_id < info.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"tokens holds {wrong}, which is not an id from 0 to {info.vocab_size - 1}", param="tokens"
            )
        return orjson.dumps({"prompt": context.model.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    return await _off_loop(len(asked.tokens), answered)


def describe(model: ServedModel, info: ModelInfo | None) -> dict[str, Any]:
    """The body of `/tokenizer_info`; `info`: the workers' description of the model, if one is known."""
    tokenizer = model.tokenizer

    def named(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token(token_id)

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "bos_token": named(tokenizer.bos_token_id),
        "eos_token": named(tokenizer.eos_token_id),
        "pad_token": None,
        "chat_template": None if model.template is None else model.template.source,
        "model_max_length": None if info is None else info.max_model_len,
    }


async def _answered(request: Request, gateway: Gateway, reader: Reader) -> Response:
    try:
        body = await gateway.bodies.read(request.receive, request.scope)
    except ClientLeftError:
        return Response(status_code=_CLIENT_LEFT)
    isolate = caller_of(request.scope).isolate
    with body, gateway.admission.place():
        return Response(await reader(body.data, gateway.dialect_context, isolate), media_type=JSON)


def _read(kind: type[AnyTokens], body: bytes, model: ServedModel) -> AnyTokens:
    asked = parse_body(kind, body)
    if asked.model is not None:
        model.require(asked.model)
    for name, value in (asked.model_extra or {}).items():
        if value is not None and value not in _HARMLESS_VALUES.get(name, ()):
            raise RequestError(
                f"{shown(name)[1:-1]}={shown(value)} is not supported by this server; leave it out",
                param=name[:128],
                code="unsupported_parameter",
            )
    return asked


async def _of_prompt(asked: TokenizeBody, text: str, model: ServedModel, info: ModelInfo) -> list[int]:
    for name in _CHAT_ONLY:
        if getattr(asked, name) is not None:
            raise RequestError(f"{name} goes with messages, not with a prompt", param=name)
    is_special = asked.add_special_tokens is not False
    return await model.encoder.encode(text, info.max_model_len, add_special_tokens=is_special, is_only_counted=True)


async def _of_chat(asked: TokenizeBody, context: DialectContext, info: ModelInfo, isolate: Isolate) -> list[int]:
    tools, choice = read_tools(asked.tools, None, None)
    conversation = Conversation(
        messages=MessageReader().read(asked.messages or (), context.limits.max_messages),
        tools=tools,
        tool_choice=choice,
        variables=template_variables(asked.chat_template_kwargs, asked.add_generation_prompt),
        add_special_tokens=bool(asked.add_special_tokens),
    )
    assembled = await assemble(conversation, context, info, isolate(UNSCOPED), is_only_counted=True)
    return assembled.token_ids.tolist()


def _strings(model: ServedModel, token_ids: Sequence[int]) -> list[str]:
    if len(token_ids) > MAX_TOKEN_STRINGS:
        raise RequestError(
            f"the text has {len(token_ids)} tokens; return_token_strs is for at most {MAX_TOKEN_STRINGS}",
            param="return_token_strs",
        )
    return [model.tokenizer.token(token_id) or "" for token_id in token_ids]


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs `work` in a thread if it is large."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)
