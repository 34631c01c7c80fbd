"""The HTTP routes of `/v1/responses`: creating a response, counting its tokens, and reading or ending stored ones."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import UnavailableError
from tandem.gateway.accounts import caller_of
from tandem.gateway.answer import JSON
from tandem.gateway.body import ClientLeftError
from tandem.gateway.edge import request_id_of
from tandem.gateway.errors import RequestError
from tandem.gateway.gateway import Gateway
from tandem.gateway.http_protocol import without_connection
from tandem.gateway.openai.responses.answer import StoredAnswer
from tandem.gateway.openai.responses.dialect import ResponsesDialect, count_input_tokens
from tandem.gateway.openai.responses.fields import InputTokensBody, ResponsesBody
from tandem.gateway.openai.responses.listing import listed
from tandem.gateway.openai.responses.service import ResponseService, as_shown
from tandem.gateway.openai.responses.writer import replayed
from tandem.gateway.openapi import body_schema

PATH = "/v1/responses"
CLIENT_LEFT = 499  # for logs only: the client has left
_TAGS: list[Any] = ["OpenAI"]
_EVENT_STREAM = "text/event-stream; charset=utf-8"


def add_responses(app: FastAPI, gateway: Gateway, service: ResponseService) -> None:
    """Adds the routes. The caller must close `service`."""
    _add_create(app, gateway, service)
    _add_count(app, gateway, service)
    _add_stored(app, service)


def _add_create(app: FastAPI, gateway: Gateway, service: ResponseService) -> None:
    @app.post(PATH, openapi_extra=body_schema(ResponsesBody), name="responses", tags=_TAGS)
    async def create(request: Request) -> Response:
        """Creates a response: streamed, whole, or in the background."""
        try:
            body = await gateway.bodies.read(request.receive, request.scope)
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        tenant = caller_of(request.scope).tenant
        dialect = ResponsesDialect(gateway.dialect_context, service.store, tenant)
        off_loop = gateway.dialect_context.off_loop
        if not await off_loop.run(len(body.data), partial(_is_background, body.data)):
            return StoredAnswer(gateway, dialect, body)
        data = body.data
        body.free()  # NOTE: it is read once more, by who serves it
        return await _run_on(gateway, service, tenant, dialect, data, request.scope)


async def _run_on(
    gateway: Gateway, service: ResponseService, tenant: str, dialect: ResponsesDialect, body: bytes, scope: Scope
) -> Response:
    """Starts a background response. NOTE: it shares the request's id, which stays in use until it has ended."""
    request_id = request_id_of(scope)

    async def serve(receive: Receive, send: Send) -> None:
        try:
            await StoredAnswer(gateway, dialect)(without_connection(scope), receive, send)
        finally:
            gateway.ids.release(request_id)

    gateway.ids.share(request_id)
    job = await service.background.begin(tenant, dialect, body, serve)
    if dialect.queued is not None:
        return _json({**dialect.queued.response, "status": "queued"})
    head = next((message for message in job.messages if message["type"] == "http.response.start"), None)
    if head is None:  # it was told to leave before it was stored
        raise UnavailableError("this gateway is stopping; another one serves", 1.0)
    refusal = b"".join(message["body"] for message in job.messages if message["type"] == "http.response.body")
    kept = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in head["headers"] if name != b"content-length"
    }
    return Response(refusal, head["status"], kept)


def _is_background(body: bytes) -> bool:
    """Whether a body asks for a background response; its errors are found later."""
    if b'"background"' not in body:
        return False
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(parsed, dict) and parsed.get("background") is True


def _add_count(app: FastAPI, gateway: Gateway, service: ResponseService) -> None:
    @app.post(f"{PATH}/input_tokens", openapi_extra=body_schema(InputTokensBody), name="input tokens", tags=_TAGS)
    async def count(request: Request) -> Response:
        """Number of tokens of a response's prompt."""
        try:
            body = await gateway.bodies.read(request.receive, request.scope)
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        with body, gateway.admission.place():
            caller, context = caller_of(request.scope), gateway.dialect_context
            number = await count_input_tokens(body.data, context, service.store, caller.tenant, caller.isolate)
        return _json({"object": "response.input_tokens", "input_tokens": number})


def _add_stored(app: FastAPI, service: ResponseService) -> None:
    @app.get(f"{PATH}/{{response_id}}", tags=_TAGS)
    async def retrieve(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    ) -> Response:
        """Retrieves a stored response. `stream`: as the events of its stream, after the event with number
        `starting_after`.
        """
        shown = as_shown(await service.find(caller_of(request.scope).tenant, response_id))
        if not stream and starting_after is None:
            return _json(shown)
        if not stream:
            raise RequestError("starting_after is only for stream=true", param="starting_after")
        if shown["status"] not in ("completed", "incomplete", "failed"):
            raise RequestError(
                f"response {response_id} is {shown['status']}; only one that has ended with an answer is streamed",
                param="stream",
            )
        frames = replayed(shown, -1 if starting_after is None else starting_after)
        return Response(frames, headers={"content-type": _EVENT_STREAM, "cache-control": "no-cache"})

    @app.delete(f"{PATH}/{{response_id}}", tags=_TAGS)
    async def delete(request: Request, response_id: str) -> Response:
        """Deletes a response; one that runs in the background is cancelled."""
        await service.delete(caller_of(request.scope).tenant, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{PATH}/{{response_id}}/cancel", tags=_TAGS)
    async def cancel(request: Request, response_id: str) -> Response:
        """Cancels a response that runs in the background."""
        return _json(await service.cancel(caller_of(request.scope).tenant, response_id))

    @app.get(f"{PATH}/{{response_id}}/input_items", tags=_TAGS)
    async def input_items(
        request: Request,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """Input items of a response, including those of earlier responses of its chain."""
        entry = await service.find(caller_of(request.scope).tenant, response_id)
        return _json(listed(entry.items, after, limit, is_ascending=order == "asc"))


def _json(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)
