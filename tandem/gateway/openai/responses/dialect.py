"""One request of `/v1/responses`, from its body to its stored answer.

A `Dialect` (`gateway.dialect`) whose instance serves one request. `responses.answer` calls `settle` before the last
byte is sent, `background` calls `abandon`. Invariant: a response reported as stored can be found before its last byte
is sent; a failing store costs the storing, never the answer.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tandem.core.errors import CapacityError, InvalidRequestError, TandemError, shown
from tandem.core.fresh_numbers import FreshNumbers
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.gateway.assembly import Assembled, assemble
from tandem.gateway.choices import expected_output, make_choices
from tandem.gateway.conversation import ToolMode
from tandem.gateway.dialect import DialectContext, Isolate, ParsedRequest
from tandem.gateway.errors import Problem, RequestError
from tandem.gateway.known_body import KnownBody
from tandem.gateway.known_conversations import KnownBeginning, KnownConversation
from tandem.gateway.message_spans import MessageSpans
from tandem.gateway.openai.frames import PING, error_body
from tandem.gateway.openai.responses.draft import draft_of
from tandem.gateway.openai.responses.fields import InputTokensBody, ResponsesBody, ResponsesPromptBody, read_body
from tandem.gateway.openai.responses.ids import is_response_id, new_response_id, response_of
from tandem.gateway.openai.responses.items import Item, read_items, reference_of, renamed_copies
from tandem.gateway.openai.responses.logprobs import TextLogprobs
from tandem.gateway.openai.responses.prompt import ResumableItem, read_conversation
from tandem.gateway.openai.responses.store import ResponseStore, StoredResponse
from tandem.gateway.openai.responses.writer import ResponseWriter
from tandem.gateway.openai.sampling import read_params
from tandem.gateway.prompt_encoder import CannotResumeError
from tandem.gateway.request import ServeRequest

MAX_REFERRED_RESPONSES = 32  # responses whose items one request may refer to

_logger = logging.getLogger(__name__)


class ResponsesDialect:
    """Parses one body and stores the answer. `queued`: the stored state of a background response until it ends."""

    kind = "responses"
    ping = PING

    def __init__(self, dialect_context: DialectContext, store: ResponseStore, tenant: str) -> None:
        self._context = dialect_context
        self._store = store
        self._tenant = tenant
        self._items: list[Item] = []
        self._writer: ResponseWriter | None = None
        self._is_settled = False
        self.queued: StoredResponse | None = None
        self.is_queued = asyncio.Event()

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        """Parses a body; raises as `Dialect.read`."""
        known = KnownBody(self._context.model.conversations, body, isolate(UNSCOPED), self.kind)
        return await known.read(partial(self._read, known, request_id, isolate))

    async def _read(
        self, known_body: KnownBody, request_id: str, isolate: Isolate, known: KnownConversation | None
    ) -> ParsedRequest:
        """Parses a body, shortened if `known` is given. Raises CannotResumeError if the whole body has to be parsed."""
        parse = partial(read_body, ResponsesBody)
        asked, spans = await known_body.parsed(known, self._context.off_loop, parse, "input")
        is_kept = spans is not None and _may_be_kept(asked)
        if known is not None and not is_kept:
            raise CannotResumeError("the response is stored, so all of its items are read")
        model = self._context.model
        model.require(asked.model)
        response_id = new_response_id()
        items = await read_context(asked, response_id, self._store, self._tenant, self._context.limits.max_messages)
        conversation, resume_item = read_conversation(asked, items, model, self._context.limits.max_messages, known)
        num_top = _num_logprobs(asked, has_tools=bool(asked.tools) and conversation.tool_choice.mode != ToolMode.NONE)
        info = await self._context.model_info.get()
        params = read_params(asked, info, model.tokenizer, max_tokens=asked.max_output_tokens, logprobs=num_top)
        scope = CacheScope(salt=asked.cache_salt or "")
        assembled = await assemble(
            conversation,
            self._context,
            info,
            isolate(scope),
            beginning=None if known is None else known.beginning,
            next_start=None if resume_item is None or not is_kept else resume_item.number,
        )
        if spans is not None and resume_item is not None and assembled.beginning is not None:
            known_body.keep(_entry(resume_item, spans, known, assembled.beginning))
        params = assembled.params(params)
        result = assembled.new_result(keep=not asked.stream)
        draft = draft_of(asked, response_id, model.name, params, int(time.time()))
        logprobs = None if num_top is None else TextLogprobs(model.tokenizer, num_top, assembled.reasoning)
        self._items, self._writer = items, ResponseWriter(draft, result, logprobs)
        if asked.background:
            await self._queue()
        return ParsedRequest(
            _request(asked, request_id, assembled, params, scope, self._context.fresh),
            (result,),
            self._writer,
            bool(asked.stream),
            answer_id=response_id,
            encoding=known_body.counted(assembled, known),
        )

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        """NOTE: reports errors to a waiting client; a background response is marked failed in the store instead."""
        if self.queued is not None and self._writer is not None and self._writer.final is None:
            self._writer.fail(problem)
        return problem.status, error_body(problem)

    async def settle(self) -> bytes | None:
        """Stores the answer if requested. Returns corrected last bytes if that failed, else None."""
        entry = self._ended()
        if entry is None or not entry.response["store"]:
            return None
        try:
            await self._store.put(self._tenant, entry, over_running=self.queued is not None)
        except TandemError as error:
            _logger.warning("response %s is not stored: %s", entry.response_id, error)
            assert self._writer is not None
            if self.queued is None:
                return self._writer.unstored()
            await self._give_up(entry, error)
        self._is_settled = True
        return None

    async def abandon(self, problem: Problem) -> None:
        """Stores a background response that ended too early: as failed without an answer, or else its answer again
        where storing it was interrupted.
        """
        if self._writer is None or self._is_settled:
            return
        if self._writer.final is None:
            self._writer.fail(problem)
        await self.settle()

    async def _queue(self) -> None:
        """Stores a background response before it runs. Raises UnavailableError or RequestError if that fails."""
        assert self._writer is not None
        queued = StoredResponse(self._writer.draft, self._items)
        try:
            await self._store.put(self._tenant, queued)
        except CapacityError as error:
            raise RequestError(str(error), param="background", code="request_too_large", status=413) from error
        self.queued = queued
        self.is_queued.set()

    async def _give_up(self, entry: StoredResponse, error: TandemError) -> None:
        """Marks a background response as failed because its answer could not be stored, if the store accepts that."""
        failure = {"code": "server_error", "message": f"the answer could not be stored: {error}"}
        response = {**entry.response, "status": "failed", "output": [], "error": failure}
        try:
            await self._store.put(self._tenant, StoredResponse(response, self._items), over_running=True)
        except TandemError as again:
            _logger.warning("response %s is lost: %s", entry.response_id, again)

    def _ended(self) -> StoredResponse | None:
        final = None if self._writer is None else self._writer.final
        return None if final is None else StoredResponse(final, self._items)


async def count_input_tokens(
    body: bytes, context: DialectContext, store: ResponseStore, tenant: str, isolate: Isolate
) -> int:
    """Number of prompt tokens of a response with this body; the prompt may exceed the context.

    Raises as `ResponsesDialect.read`.
    """
    asked = await context.off_loop.run(len(body), partial(read_body, InputTokensBody, body))
    if asked.model is not None:
        context.model.require(asked.model)
    items = await read_context(asked, new_response_id(), store, tenant, context.limits.max_messages)
    conversation, _ = read_conversation(asked, items, context.model, context.limits.max_messages)
    info = await context.model_info.get()
    assembled = await assemble(conversation, context, info, isolate(UNSCOPED), is_only_counted=True)
    return len(assembled.token_ids)


async def read_context(
    asked: ResponsesPromptBody, response_id: str, store: ResponseStore, tenant: str, max_items: int
) -> list[Item]:
    """All items that the model is shown: those of the earlier responses that this one continues, then the new ones.

    Raises:
        InvalidRequestError: naming the item or response that is not supported or was not found.
        UnavailableError: the store is unavailable.
    """
    if isinstance(asked.input, list) and len(asked.input) > max_items:
        raise RequestError(f"input has {len(asked.input)} items; at most {max_items} are taken", param="input")
    new = read_items(asked.input or [], response_id)
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = (await _previous(asked.previous_response_id, store, tenant)).context
    return [*before, *renamed_copies(await _resolved(new, store, tenant), before, response_id)]


async def _previous(response_id: str, store: ResponseStore, tenant: str) -> StoredResponse:
    entry = await store.find(tenant, response_id) if is_response_id(response_id) else None
    if entry is None:
        raise _previous_error(f"previous response {shown(response_id)} was not found", "previous_response_not_found")
    if entry.response["status"] not in ("completed", "incomplete"):
        status = "failed" if entry.is_lost else entry.response["status"]
        raise _previous_error(f"previous response {response_id} is {status}; only one with an answer can go on")
    return entry


def _previous_error(message: str, code: str | None = None) -> InvalidRequestError:
    return RequestError(message, param="previous_response_id", code=code)


async def _resolved(items: Sequence[Item], store: ResponseStore, tenant: str) -> list[Item]:
    """`items` with references replaced by the items they refer to."""
    wanted = [reference for item in items if (reference := reference_of(item)) is not None]
    owners = {owner for reference in wanted if (owner := response_of(reference)) is not None}
    if len(owners) > MAX_REFERRED_RESPONSES:
        raise RequestError(
            f"input refers to items of {len(owners)} responses; at most {MAX_REFERRED_RESPONSES}", param="input"
        )
    known: dict[str, Item] = {}
    for owner in owners:
        entry = await store.find(tenant, owner)
        known |= {} if entry is None else {item["id"]: item for item in entry.context}
    missing = next((reference for reference in wanted if reference not in known), None)
    if missing is not None:
        raise RequestError(f"input refers to item {shown(missing)}, which was not found", param="input")
    return [known.get(item["id"], item) if item["type"] == "item_reference" else item for item in items]


def _request(
    asked: ResponsesBody,
    request_id: str,
    assembled: Assembled,
    params: SamplingParams,
    scope: CacheScope,
    fresh: FreshNumbers,
) -> ServeRequest:
    return ServeRequest(
        request_id=request_id,
        model=assembled.model.name,
        choices=make_choices(request_id, [assembled.token_ids], params, fresh),
        num_expected_output=expected_output(params),
        priority=asked.priority or 0,
        scope=scope,
        session_id=asked.prompt_cache_key,
        pins=assembled.pins,
    )


def _may_be_kept(asked: ResponsesBody) -> bool:
    """Whether the conversation may be cached: it is all in the body, and only the prompt is computed from it."""
    is_whole = asked.previous_response_id is None and isinstance(asked.input, list)
    if not is_whole or asked.store is not False or asked.cache_salt:
        return False
    assert isinstance(asked.input, list)
    return not any(item.get("type") == "item_reference" or item.keys() == {"id"} for item in asked.input)


def _entry(
    resume_item: ResumableItem, spans: MessageSpans, known: KnownConversation | None, beginning: KnownBeginning
) -> KnownConversation:
    shown, left_out = (spans, 0) if known is None else (known.spans(spans), known.num_left_out)
    return KnownConversation.of(
        shown,
        resume_item.places,
        resume_item.calls,
        beginning,
        num_left_out=left_out,
        reader_state=resume_item.num_unread,
    )


def _num_logprobs(asked: ResponsesBody, *, has_tools: bool) -> int | None:
    """Logprobs to compute. NOTE: refused where tools may be called, since the tokens of text are then not known."""
    is_wanted = bool(asked.top_logprobs) or "message.output_text.logprobs" in (asked.include or ())
    if is_wanted and has_tools:
        name: Any = "top_logprobs" if asked.top_logprobs else "include"
        raise RequestError(f"{name}: logprobs are not given for answers that may call tools", param=name)
    return (asked.top_logprobs or 0) if is_wanted else None
