"""Checks the content type and encoding of bodies: only uncompressed bodies declared as JSON are read.

This keeps web pages of other sites from making their visitors' browsers send requests here: a browser sends text/plain,
a form, or a body without a type for any page, but JSON only after a preflight (a request for permission), which is
answered for allowed origins alone. A missing type is refused too; curl sends a form by default, every SDK JSON. Pure.
"""

from starlette.types import Scope

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError

_REMEDY = "send the header content-type: application/json (curl: -H 'content-type: application/json', or --json)"


def check_content_type(scope: Scope) -> None:
    """Raises RequestError with status 415 for a body that is not declared as JSON."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    if not given:
        raise RequestError(f"the body has no content-type; {_REMEDY}", code="unsupported_media_type", status=415)
    for value in given:
        if not _is_json(value):
            raise RequestError(
                f"content-type={shown(value)} is not JSON; {_REMEDY}", code="unsupported_media_type", status=415
            )


def check_codings(scope: Scope) -> None:
    """Raises RequestError: status 415 for a compressed body, 501 for a transfer encoding other than chunked."""
    for name, value in scope["headers"]:
        given = value.decode("latin-1")
        if name == b"content-encoding" and given.strip().lower() not in ("", "identity"):
            raise RequestError(
                f"content-encoding={shown(given)} is not supported by this server; send the body uncompressed",
                code="unsupported_media_type",
                status=415,
            )
        if name == b"transfer-encoding" and given.strip().lower() != "chunked":
            raise RequestError(
                f"transfer-encoding={shown(given)} is not supported by this server but for 'chunked'",
                code="unsupported_transfer_encoding",
                status=501,
            )


def _is_json(value: str) -> bool:
    """Whether it is application/json or application/….+json, whatever its parameters."""
    kind, _, name = value.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (name == "json" or name.endswith("+json"))
