"""HTTP to one API server through the `kubernetes` client's asyncio part. Imported only when Kubernetes is used.

Invariant: every call ends within its timeout or is cancelled with its connection; every failure is a `KubeError`. No
retries. Only the client's authentication and transport are used: its own calls may take five minutes, and its Watch
reconnects, and ends, silently.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from tandem.core.errors import ConfigurationError, shown
from tandem.kube.access import Access
from tandem.kube.call import KubeCall
from tandem.kube.errors import BadAnswerError, KubeError, KubeUnavailableError, UnauthorizedError, error_of

Query = Sequence[tuple[str, str]]

_client: Any = import_module("kubernetes.aio.client")
_config: Any = import_module("kubernetes.aio.config")
_yaml: Any = import_module("yaml")

_MAX_ANSWER_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 20
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, _config.ConfigException, _yaml.YAMLError)


class KubeConnection:
    """A `KubeTransport`, described in `api`. The first call opens it; close it in the same event loop.

    Args:
        timeout_s: from a call to the end of its answer; for a watch, to its beginning.
    """

    def __init__(self, access: Access, *, timeout_s: float = 10.0) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._client: Any = None

    async def ask(
        self, call: KubeCall, *, query: Query = (), body: Mapping[str, Any] | None = None, content_type: str = ""
    ) -> Mapping[str, Any]:
        with _named_failures(call, self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                response = await self._send(call, query, body, content_type, aiohttp.ClientTimeout(total=None))
                try:
                    data = await _read(response, call, _MAX_ANSWER_BYTES)
                finally:
                    response.close()
        _require_success(call, response, data)
        return _object(call, data)

    async def follow(
        self, call: KubeCall, *, query: Query, silence_s: float
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=silence_s)
        with _named_failures(call, self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                response = await self._send(call, query, None, "", timeout)
        try:
            if response.status >= 300:
                with _named_failures(call, self._timeout_s):
                    async with asyncio.timeout(self._timeout_s):
                        data = await _read(response, call, _MAX_ERROR_BYTES)
                _require_success(call, response, data)
            with _named_failures(call, silence_s):
                while line := await response.content.readline():
                    yield _object(call, line)
        finally:
            response.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _send(
        self,
        call: KubeCall,
        query: Query,
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        client = await self._open()
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if content_type else {})
        try:
            method, url, headers, _, _ = await client.param_serialize(
                call.method, call.path, query_params=list(query), header_params=headers, auth_settings=["BearerToken"]
            )
        except OSError as error:
            raise UnauthorizedError(call, f"the token cannot be read ({error})") from error
        answer = await client.call_api(method, url, headers, body, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = _client.ApiClient(await _configuration(self._access))
            return self._client


def namespace_of(access: Access) -> str:
    """The namespace of `access`, or of the kubeconfig's current context; "" when neither is set.

    Raises:
        ConfigurationError: the kubeconfig cannot be read.
    """
    if access.namespace or not access.kubeconfig:
        return access.namespace
    with _readable(access):
        _, active = _config.list_kube_config_contexts(access.kubeconfig)
        named = active["context"].get("namespace", "")
    return named if isinstance(named, str) else ""


async def _configuration(access: Access) -> Any:
    """`access` as the client's configuration.

    Raises:
        ConfigurationError: a file cannot be read or lacks what is needed.
    """
    configuration = _client.Configuration(host=access.url or None)
    with _readable(access):
        if access.kubeconfig:
            await _config.load_kube_config(
                config_file=access.kubeconfig, client_configuration=configuration, persist_config=False
            )
        elif access.ca_file is not None:
            access.ca_file.read_bytes()
            configuration.ssl_ca_cert = str(access.ca_file)
    if access.token_file is not None:
        configuration.refresh_api_key_hook = lambda own: own.api_key.update(BearerToken=_bearer(access))
        configuration.api_key["BearerToken"] = "Bearer"
    elif access.token:
        configuration.api_key["BearerToken"] = f"Bearer {access.token}"
    return configuration


def _bearer(access: Access) -> str:
    assert access.token_file is not None
    token = access.token_file.read_text().strip()
    if not token:
        raise OSError(f"{access.token_file} is empty")
    return f"Bearer {token}"


@contextlib.contextmanager
def _readable(access: Access) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        source = access.kubeconfig or access.ca_file
        raise ConfigurationError(
            f"{source} does not say how to reach the Kubernetes API ({error}); repair it"
        ) from error


@contextlib.contextmanager
def _named_failures(call: KubeCall, timeout_s: float) -> Iterator[None]:
    """Turns failures below HTTP into `KubeError`."""
    try:
        yield
    except KubeError:
        raise
    except TimeoutError as error:
        raise KubeUnavailableError(call, f"no answer within {timeout_s:g} s; try again later") from error
    except aiohttp.ClientSSLError as error:
        raise KubeUnavailableError(call, f"the server's certificate is not accepted ({error}); check the CA") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        reason = f"the server cannot be reached, or broke off ({error or type(error).__name__}); try again later"
        raise KubeUnavailableError(call, reason) from error
    except (aiohttp.ClientError, HttpProcessingError, ValueError) as error:
        raise BadAnswerError(
            call, f"no HTTP that can be understood ({shown(str(error))}); check the address"
        ) from error


async def _read(response: aiohttp.ClientResponse, call: KubeCall, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise BadAnswerError(call, f"more than {max_bytes} bytes; check the address")
    return bytes(data)


def _require_success(call: KubeCall, response: aiohttp.ClientResponse, data: bytes) -> None:
    if response.status < 300:
        return
    after = response.headers.get("Retry-After", "")
    try:
        status = json.loads(data)
    except (ValueError, RecursionError):
        status = None
    status_object = status if isinstance(status, dict) else {}
    raise error_of(call, response.status, status_object, float(after) if after.isdecimal() else None)


def _object(call: KubeCall, data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(call, f"{shown(data)} is not JSON; check the address") from error
    if not isinstance(found, dict):
        raise BadAnswerError(call, f"{shown(data)} is no object; check the address")
    return found
