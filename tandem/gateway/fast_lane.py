"""Serves the endpoints that generate text before the web framework, whose overhead is half a millisecond a request.

The framework still describes these endpoints in its OpenAPI document.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.answer import EndpointResponse
from tandem.gateway.dialect import Dialect
from tandem.gateway.gateway import Gateway


class FastLane:
    """ASGI app that serves POST requests to the paths of `dialects` and passes all other requests to `app`."""

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
