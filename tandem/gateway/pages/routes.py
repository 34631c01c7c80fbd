"""Routes of the web pages: `/`, `/playground`, `/operations`, `/trace`, their files, and `/admin/overview`.

A page may load, call and run only what this gateway serves; the headers tell the browser so.
"""

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tandem.gateway.errors import RequestError
from tandem.gateway.gateway import Gateway
from tandem.gateway.operations import Overview
from tandem.gateway.pages.assets import Asset, Assets

JSON = "application/json"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_PAGES = {
    "/": "playground.html",
    "/playground": "playground.html",
    "/operations": "operations.html",
    "/trace": "trace.html",
}
_FOR_EVER = "public, max-age=31536000, immutable"


def add_pages(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes of the pages."""
    assets = Assets.load()
    for path, name in _PAGES.items():
        _add_page(app, path, assets.by_name[name], f'"{assets.digest}"')
    _add_files(app, assets)
    _add_overview(app, gateway)


def _add_page(app: FastAPI, path: str, page: Asset, etag: str) -> None:
    """Adds a page. Browsers revalidate it each time, so that it names the files of the current version."""
    headers = {"cache-control": "no-cache", "etag": etag, **_HEADERS}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(page.body, media_type=page.content_type, headers=headers)

    app.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)


def _add_files(app: FastAPI, assets: Assets) -> None:
    async def serve(digest: str, name: str) -> Response:
        asset = assets.by_name.get(name)
        if asset is None:
            raise RequestError(f"there is no file {name[:80]!r}", status=404, code="not_found")
        # NOTE: a page of another version, as gateways are upgraded one by one, gets our file, but may not keep it.
        caching = _FOR_EVER if digest == assets.digest else "no-store"
        return Response(asset.body, media_type=asset.content_type, headers={"cache-control": caching, **_HEADERS})

    app.add_api_route("/pages/{digest}/{name}", serve, methods=["GET", "HEAD"], include_in_schema=False)


def _add_overview(app: FastAPI, gateway: Gateway) -> None:
    overview = Overview(gateway)

    @app.get("/admin/overview", tags=["operations"])
    async def read(request: Request) -> Response:
        """Data of the operations page: processes, links, decisions, and rates and percentiles of the last minute."""
        host, port = request.scope.get("server") or ("", None)
        return Response(await overview.body(f"{host}:{port}"), media_type=JSON)
