"""Operators' paths (`/metrics` and `/admin/`, which show the whole cluster) and the separate port that may serve them.

`/admin/requests/ID` is not an operator's path: a tenant may see the timelines of its own requests.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.errors import RequestError

METRICS = "/metrics"
ADMIN = "/admin/"
_OWN = "/admin/requests/"  # timelines of requests, which tenants may read too
_KEY = "tandem.is_operator_port"
# Beside those, on the operators' port.
_ALSO = ("/health", "/ready", "/ping", "/version", "/operations", "/trace")
_ALSO_BELOW = (ADMIN, "/pages/")


class OperatorPort:
    """ASGI app of the operators' port: marks each request, see `is_operator_port`, and passes it to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _KEY: True}, receive, send)


def is_operator_port(scope: Scope) -> bool:
    """Whether a request arrived on the operators' port."""
    return _KEY in scope


def is_operator_path(path: str) -> bool:
    """Whether a path is for operators only: /metrics and /admin/, except the timelines that tenants may see."""
    return path == METRICS or (path.startswith(ADMIN) and not path.startswith(_OWN))


def is_closed_to_pages(path: str) -> bool:
    """Whether web pages of other origins may never read this path, whatever is configured."""
    return path == METRICS or path.startswith(ADMIN)


def check_port(scope: Scope) -> None:
    """Raises RequestError for a path that the operators' port does not serve."""
    path: str = scope["path"]
    if is_operator_port(scope) and not (path == METRICS or path in _ALSO or path.startswith(_ALSO_BELOW)):
        raise RequestError(
            f"{path[:128]} is not answered on this port, which is for operators; use the gateway's --port",
            code="not_found",
            status=404,
        )
