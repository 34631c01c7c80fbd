"""Outermost ASGI layer: assigns each request an id and a caller, adds the id to responses, and answers bugs with a 500.

Pure ASGI, so that a client's disconnect reaches the inner layers. Never reads a body.
"""

import logging
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.core.errors import TandemError, UnavailableError
from tandem.gateway.accounts import Caller, set_caller
from tandem.gateway.accounts_headers import problem_for, refusal_headers
from tandem.gateway.refusal import refusal_of
from tandem.gateway.request_ids import RequestIds
from tandem.telemetry.log import request_context

_STATE_KEY = "tandem.request_id"

_logger = logging.getLogger(__name__)

Admit = Callable[[Scope], Awaitable[Caller]]


class Edge:
    """Wraps `app`. `admit`: returns the caller of a request or raises TandemError; None: every request is anonymous."""

    def __init__(self, app: ASGIApp, ids: RequestIds, admit: Admit | None = None) -> None:
        self._app = app
        self._ids = ids
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._ids.claim(header_of(scope, b"x-request-id") or header_of(scope, b"request-id"))
        scope[_STATE_KEY] = request_id
        guarded = _Guarded(send, request_id)
        try:
            with request_context(request_id):
                await self._serve(scope, receive, guarded)
        finally:
            self._ids.release(request_id)

    async def _serve(self, scope: Scope, receive: Receive, guarded: "_Guarded") -> None:
        try:
            if await self._is_admitted(scope, guarded):
                await self._app(scope, receive, guarded)
        except Exception as error:  # the edge of the process: whatever it is, the client gets an answer
            _logger.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(error, scope, guarded)

    async def _is_admitted(self, scope: Scope, guarded: "_Guarded") -> bool:
        """Whether the request may pass; if not, the refusal has been sent."""
        if self._admit is None:
            return True
        try:
            set_caller(scope, await self._admit(scope))
        except TandemError as error:
            level = logging.WARNING if isinstance(error, UnavailableError) else logging.INFO
            _logger.log(level, "%s %s is refused: %s", scope["method"], scope["path"], error)
            await self._refuse(error, scope, guarded)
            return False
        return True

    async def _refuse(self, error: Exception, scope: Scope, guarded: "_Guarded") -> None:
        if guarded.has_begun:
            return
        problem = problem_for(error)
        status, body = refusal_of(problem, scope["path"], request_id_of(scope))
        fields = {"content-type": "application/json", **problem.headers, **refusal_headers(error, is_anthropic=False)}
        headers = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in fields.items()]
        await guarded({"type": "http.response.start", "status": status, "headers": headers})
        await guarded({"type": "http.response.body", "body": body})


class _Guarded:
    """`send` that adds the request's id to the response's headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id = request_id.encode("ascii")
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            own = [(b"x-request-id", self._id), (b"request-id", self._id)]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of the first header of this name, or None."""
    found = next((value for key, value in scope["headers"] if key == name), None)
    return None if found is None else found.decode("latin-1")


def request_id_of(scope: Scope) -> str:
    """The id that `Edge` assigned to this request."""
    return str(scope[_STATE_KEY])
