"""Serves one request of the Responses API over ASGI and stores its answer.

The answer is stored before the client has its last byte, so that a request that refers to it finds it.
"""

from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.gateway.answer import EndpointResponse
from tandem.gateway.body import Body
from tandem.gateway.gateway import Gateway
from tandem.gateway.openai.responses.dialect import ResponsesDialect


class StoredAnswer(Response):
    """Serves a request by `answer.EndpointResponse` and stores its answer. `body`: the body, if it was read before."""

    def __init__(self, gateway: Gateway, dialect: ResponsesDialect, body: Body | None = None) -> None:
        super().__init__()
        self._answer = EndpointResponse(gateway, dialect, body)
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, _StoringSend(self._dialect, send))


class _StoringSend:
    """A `send` that stores the answer before the last message. NOTE: headers wait, since the length may change.

    An error that takes the answer's place, because the time was up while it was stored, is sent as it is.
    """

    def __init__(self, dialect: ResponsesDialect, send: Send) -> None:
        self._dialect = dialect
        self._send = send
        self._head: MutableMapping[str, Any] | None = None
        self._was_last = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not message.get("more_body", False) and not self._was_last:
            self._was_last = True
            if (corrected := await self._dialect.settle()) is not None:
                message = {**message, "body": corrected}
                self._correct_length(len(corrected))
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)
        await self._send(message)

    def _correct_length(self, num_bytes: int) -> None:
        if self._head is None:
            return
        headers = [(name, value) for name, value in self._head["headers"] if name != b"content-length"]
        self._head = {**self._head, "headers": [*headers, (b"content-length", str(num_bytes).encode())]}
