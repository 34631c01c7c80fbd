"""The HTTP routes of a gateway, assembled into its ASGI apps.

Errors outside the dialects, such as unknown paths, have OpenAI's format; below `/v1/messages` they have Anthropic's.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from tandem import __version__
from tandem.core.addresses import is_loopback
from tandem.core.errors import InvalidRequestError, TandemError, UnavailableError, shown
from tandem.gateway.accounts import caller_of
from tandem.gateway.accounts_guard import Guard
from tandem.gateway.accounts_routes import add_account_routes
from tandem.gateway.admin import find_request, list_decisions, list_processes
from tandem.gateway.answer import JSON, EndpointResponse
from tandem.gateway.anthropic.dialect import MessagesDialect, count_tokens
from tandem.gateway.anthropic.fields import MessagesBody, MessagesPromptBody
from tandem.gateway.body import ClientLeftError
from tandem.gateway.browser_rules import BrowserRules
from tandem.gateway.cross_origin import CrossOrigin
from tandem.gateway.dialect import Dialect
from tandem.gateway.edge import Edge, request_id_of
from tandem.gateway.errors import Problem, http_problem, problem_of
from tandem.gateway.fast_lane import FastLane
from tandem.gateway.gateway import Gateway
from tandem.gateway.open_guard import OpenGuard
from tandem.gateway.openai.chat import ChatDialect
from tandem.gateway.openai.completions import CompletionDialect
from tandem.gateway.openai.fields import ChatBody, CompletionBody
from tandem.gateway.openai.models import list_models, one_model
from tandem.gateway.openai.responses.routes import add_responses
from tandem.gateway.openapi import body_schema, document
from tandem.gateway.operator_port import OperatorPort
from tandem.gateway.pages.routes import add_pages
from tandem.gateway.refusal import refusal_of
from tandem.gateway.settings import GatewaySettings
from tandem.gateway.tokens import add_tokens

CLIENT_LEFT = 499  # HTTP status of a request whose client has left; nobody receives it
_PROBED = ("/health", "/ready", "/ping")  # paths that health probes may also ask by HEAD
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Apps:
    """The ASGI apps of a gateway. `public`: for users; `operator`: for the operators' port."""

    public: ASGIApp
    operator: ASGIApp


def build_apps(gateway: Gateway, settings: GatewaySettings) -> Apps:
    """Builds all routes over a started gateway."""
    app = FastAPI(title="Tandem", version=__version__, redirect_slashes=False)
    context = gateway.dialect_context
    generating: list[tuple[str, Dialect, type[BaseModel], str]] = [
        ("/v1/chat/completions", ChatDialect(context), ChatBody, "OpenAI"),
        ("/v1/completions", CompletionDialect(context), CompletionBody, "OpenAI"),
        ("/v1/messages", MessagesDialect(context), MessagesBody, "Anthropic"),
    ]
    for path, dialect, body, tag in generating:
        _add_generating(app, gateway, path, dialect, body, tag)
    _add_count(app, gateway)
    add_responses(app, gateway, gateway.responses)
    _add_models(app, gateway)
    _add_health(app, gateway)
    add_tokens(app, gateway)
    _add_heads(app)
    _add_admin(app, gateway)
    if gateway.accounts is not None:
        add_account_routes(app, gateway.accounts)
    add_pages(app, gateway)
    _add_error_handlers(app)
    document(app)
    fast = FastLane(app, gateway, {path: dialect for path, dialect, _, _ in generating})
    edge = Edge(fast, gateway.ids, guard_of(gateway, settings).admit)
    return Apps(CrossOrigin(edge, settings.origins) if settings.origins else edge, OperatorPort(edge))


def guard_of(gateway: Gateway, settings: GatewaySettings) -> Guard | OpenGuard:
    """The guard that admits requests: checks API keys, or without accounts refuses web pages of other sites."""
    if gateway.accounts is not None:
        return Guard(gateway.accounts)
    rules = BrowserRules((settings.host.lower(), *settings.hosts), settings.origins)
    return OpenGuard(rules, has_operators=settings.admin_bind is None and is_loopback(settings.host))


def _add_generating(
    app: FastAPI, gateway: Gateway, path: str, dialect: Dialect, body: type[BaseModel], tag: str
) -> None:
    @app.post(path, openapi_extra=body_schema(body), name=dialect.kind, tags=[tag])
    async def generate() -> Response:
        """Generates an answer, whole or as a stream of server-sent events."""
        return EndpointResponse(gateway, dialect)


def _add_count(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(MessagesPromptBody), tags=["Anthropic"])
    async def count(request: Request) -> Response:
        """Number of tokens of a message's prompt."""
        try:
            body = await gateway.bodies.read(request.receive, request.scope)
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        isolate = caller_of(request.scope).isolate
        with body, gateway.admission.place():
            return Response(await count_tokens(body.data, gateway.dialect_context, isolate), media_type=JSON)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The served model, with its limits."""
        return JSONResponse(list_models(gateway.model, gateway.model_info.known))

    @app.get("/v1/models/{model_id:path}", tags=["OpenAI"])
    async def model(model_id: str) -> Response:
        """One model by its name; 404 if it is not served."""
        return JSONResponse(one_model(model_id, gateway.model, gateway.model_info.known))


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", tags=["operations"])
    async def health() -> Response:
        """Whether this process is alive."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", tags=["operations"])
    async def ready() -> Response:
        """200 if a router answers and a decode worker is alive, else 503."""
        if gateway.admission.is_closed:
            raise UnavailableError("this gateway is stopping", 1.0)
        info = await gateway.model_info.fetch()
        if not info.num_decode:
            raise UnavailableError(f"no live decode worker serves {info.name!r}", 1.0)
        return JSONResponse({"status": "ready", "num_prefill": info.num_prefill, "num_decode": info.num_decode})

    @app.get("/version", tags=["operations"])
    async def version() -> Response:
        """Version of Tandem."""
        return JSONResponse({"version": __version__})

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Metrics of this gateway, in Prometheus' text format."""
        return Response(gateway.metrics.text(), headers={"content-type": METRICS_TYPE})


def _add_heads(app: FastAPI) -> None:
    """Some probes ask by HEAD; the server itself leaves the body out."""
    for route in [route for route in app.routes if isinstance(route, APIRoute) and route.path in _PROBED]:
        if "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _add_admin(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/admin/workers", tags=["operations"])
    async def workers(request: Request) -> Response:
        """All processes of the cluster: gateway, routers and workers."""
        host, port = request.scope.get("server") or ("", None)
        return JSONResponse(await list_processes(gateway, f"{host}:{port}"))

    @app.get("/admin/decisions", tags=["operations"])
    async def decisions(last: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        """The `last` routing decisions (1 to 1,000, default 100), oldest first: predicted and measured milliseconds."""
        return JSONResponse(await list_decisions(gateway, last))

    @app.get("/admin/requests/{request_id}", tags=["operations"])
    async def timeline(request: Request, request_id: str) -> Response:
        """Timeline of a recent request: its stages and their durations."""
        return JSONResponse(find_request(gateway, request_id, caller_of(request.scope)))


def _add_error_handlers(app: FastAPI) -> None:
    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = http_problem(error.status_code, request.url.path, request.method)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_methods_at(request))
        return _as_response(request, problem, headers)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][1:])).encode(errors="replace").decode()  # NOTE: JSON can spell surrogates
        return _as_response(request, problem_of(InvalidRequestError(f"{name}={shown(first['input'])}: {first['msg']}")))

    async def on_any(request: Request, error: Exception) -> Response:
        """NOTE: the framework raises a bug again after this handler, and `Edge` logs it."""
        return _as_response(request, problem_of(error))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(TandemError, on_any)
    app.add_exception_handler(Exception, on_any)


def _methods_at(request: Request) -> list[str]:
    """Methods of all routes of a path. NOTE: the framework's own `Allow` lists those of the first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for methods in found for method in methods})


def _as_response(request: Request, problem: Problem, headers: dict[str, Any] | None = None) -> Response:
    status, body = refusal_of(problem, request.url.path, request_id_of(request.scope))
    return Response(body, status, {**(headers or {}), **problem.headers}, JSON)
