"""Health probe and reader of operators' pages: one small HTTP GET to a process of the deployment.

Not for users' requests: the answer is bounded in size, redirects and proxies are not followed.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.core.errors import ConfigurationError, UnavailableError, shown, without_password

_MAX_ANSWER_BYTES = 64 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """Response to a probe."""

    status: int
    body: bytes


async def get(url: str, timeout_s: float, api_key: str | None = None) -> ProbeResponse:
    """Fetches `url`. `api_key`: needed by a gateway with accounts; printable ASCII.

    Raises:
        ConfigurationError: it is no HTTP address.
        UnavailableError: no server answered in HTTP within `timeout_s`.
    """
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in _DEFAULT_PORTS or not host or not url.isascii() or any(map(str.isspace, url)):
        raise ConfigurationError(f"{shown(without_password(url))} is no HTTP address; use one as http://127.0.0.1:8000")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
    head = f"GET {target} HTTP/1.0\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n{key}\r\n"
    request = head.encode("ascii", "replace")
    try:
        async with asyncio.timeout(timeout_s):
            return _parsed(await _exchange(host, port or _DEFAULT_PORTS[scheme], scheme == "https", request))
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        cause = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise UnavailableError(f"{without_password(url)}: {cause}") from error


async def _exchange(host: str, port: int, is_secure: bool, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=is_secure or None)
    try:
        writer.write(request)
        answer = bytearray()
        while chunk := await reader.read(1 << 16):
            answer += chunk
            if len(answer) > _MAX_ANSWER_BYTES:
                raise ValueError(f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")
        return bytes(answer)
    finally:
        writer.transport.abort()


def _parsed(answer: bytes) -> ProbeResponse:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        raise ValueError("the answer is no HTTP")
    return ProbeResponse(int(head.split(b" ", 2)[1]), body)
