"""The Kubernetes API as plain JSON for the harness: get, create, patch, delete, and a map of objects kept fresh.

It speaks HTTP itself so that kubelet and services depend on none of the code they are there to test.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

Object = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
_WATCH_S = 300
_PAUSE_S = 0.5


class ApiError(RuntimeError):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One client; close it, or use it as an async context manager."""

    def __init__(self, url: str, token: str, ca_file: Path) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(ca_file)),
            timeout=30,
            trust_env=False,
        )

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str, **query: str) -> Object:
        """An object or a list. Raises ApiError."""
        return _checked(await self._client.get(path, params=query))

    async def find(self, path: str) -> Object | None:
        """An object, or None when there is none. Raises ApiError."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a list. Raises ApiError."""
        found: list[Object] = (await self.get(path, **query))["items"]
        return found

    async def create(self, path: str, body: Object) -> Object:
        """POST. Raises ApiError."""
        return _checked(await self._client.post(path, json=body))

    async def patch(self, path: str, body: Object, kind: str = STRATEGIC) -> Object:
        """PATCH in one of the forms the server knows. Raises ApiError."""
        return _checked(await self._client.patch(path, content=json.dumps(body), headers={"Content-Type": kind}))

    async def delete(self, path: str, body: Object | None = None) -> None:
        """DELETE; what is gone already is well. Raises ApiError."""
        response = await self._client.request("DELETE", path, json=body)
        if response.status_code != 404:
            _checked(response)

    async def follow(self, path: str, **query: str) -> AsyncIterator[dict[str, Object]]:
        """All objects of a collection by uid, again after every change; goes on when the API server was away.

        The map that is yielded is the caller's to read until the next one is asked for.
        """
        while True:
            try:
                listed = await self.get(path, **query)
                objects: dict[str, Object] = {item["metadata"]["uid"]: item for item in listed["items"]}
                yield objects
                async for _ in self._changes(path, query, objects, listed["metadata"]["resourceVersion"]):
                    yield objects
            except (httpx.HTTPError, ApiError):
                await asyncio.sleep(_PAUSE_S)

    async def _changes(
        self, path: str, query: dict[str, str], objects: dict[str, Object], version: str
    ) -> AsyncIterator[None]:
        asked = {**query, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        async with self._client.stream("GET", path, params=asked, timeout=httpx.Timeout(30, read=None)) as response:
            if response.status_code != 200:
                raise ApiError(response.status_code, "watch refused")
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                uid = event["object"]["metadata"]["uid"]
                if event["type"] == "DELETED":
                    objects.pop(uid, None)
                else:
                    objects[uid] = event["object"]
                yield


def _checked(response: httpx.Response) -> Object:
    if response.status_code >= 300:
        raise ApiError(response.status_code, _reason(response))
    body: Object = response.json() if response.content else {}
    return body


def _reason(response: httpx.Response) -> str:
    """NOTE: of a kind that it does not know the server says so in plain text."""
    try:
        return str(response.json().get("message", response.text))
    except ValueError:
        return response.text.strip()
