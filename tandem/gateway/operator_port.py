"""`/metrics` and `/admin/`, which show the whole cluster, and the port of their own on which they can be.

A tenant's own timelines, `/admin/requests/ID`, are no operator's path: whoever has a request's id may see it.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.gateway.errors import RequestError

METRICS = "/metrics"
ADMIN = "/admin/"
_OWN = "/admin/requests/"
_KEY = "tandem.is_operator_port"
# Beside those, on the operators' port.
_ALSO = ("/health", "/ready", "/ping", "/version", "/operations", "/trace")
_ALSO_BELOW = (ADMIN, "/pages/")


class OperatorPort:
    """Wraps `app` for a listener that users do not reach."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _KEY: True}, receive, send)


def is_operator_port(scope: Scope) -> bool:
    """Whether a request came by the operators' port."""
    return _KEY in scope


def is_operator_path(path: str) -> bool:
    """/metrics and all below /admin/, but for what each tenant may see of its own."""
    return path == METRICS or (path.startswith(ADMIN) and not path.startswith(_OWN))


def is_closed_to_pages(path: str) -> bool:
    """Whether no page of another origin may have it, whatever is allowed."""
    return path == METRICS or path.startswith(ADMIN)


def check_port(scope: Scope) -> None:
    """Raises RequestError for what the operators' port does not have."""
    path: str = scope["path"]
    if is_operator_port(scope) and not (path == METRICS or path in _ALSO or path.startswith(_ALSO_BELOW)):
        raise RequestError(
            f"{path[:128]} is not answered on this port, which is for operators; use the gateway's --port",
            code="not_found",
            status=404,
        )
