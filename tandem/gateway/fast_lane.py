"""Serves the generating paths before the web framework, whose own processing would cost half a millisecond a request.

The framework still describes these paths in its OpenAPI document.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.answer import EndpointResponse
from tandem.gateway.dialect import Dialect
from tandem.gateway.gateway import Gateway


class FastLane:
    """Wraps `app`. `dialects`: by path; they answer POST."""

    def __init__(self, app: ASGIApp, gateway: Gateway, dialects: Mapping[str, Dialect]) -> None:
        self._app = app
        self._gateway = gateway
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = None
        if scope["type"] == "http" and scope["method"] == "POST":
            dialect = self._dialects.get(scope["path"])
        if dialect is None:
            await self._app(scope, receive, send)
        else:
            await EndpointResponse(self._gateway, dialect)(scope, receive, send)
