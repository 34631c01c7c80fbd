"""CORS: web origins that may call from browsers. Runs before keys are checked, because preflights never carry one.

Invariant: no page of another origin can read an answer of `/admin/` or `/metrics`. Cookies are never allowed.
"""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.operator_port import is_closed_to_pages

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_ALL = ("*",)


class CrossOrigin:
    """Wraps `app` with CORS headers. `origins`: as in the `Origin` header; `*`: every one."""

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
