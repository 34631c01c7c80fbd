"""CORS: web pages that may call from browsers, before anybody is asked for a key, which preflights never carry.

Invariant: an answer of `/admin/` or `/metrics` is shown to no page of another origin. Cookies are never asked for.
"""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.operator_port import is_closed_to_pages

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_ALL = ("*",)


class CrossOrigin:
    """Wraps `app`. `origins`: as browsers name them; `*`: every one."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=_ALL,
            allow_private_network=True,
            expose_headers=_ALL,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_closed = scope["type"] != "http" or is_closed_to_pages(scope["path"])
        await (self._app if is_closed else self._open)(scope, receive, send)
