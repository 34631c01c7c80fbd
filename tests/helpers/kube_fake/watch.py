"""A watch: events of what a selector chooses, in one long answer, until its time is over or the server stops."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from tests.helpers.kube_fake.request import KINDS, Asked
from tests.helpers.kube_fake.store import ApiError, Change, Store

Event = tuple[str, Mapping[str, Any]]
_LONGEST_S = 1800.0


async def watch(request: web.Request, asked: Asked, store: Store, stopping: asyncio.Event) -> web.StreamResponse:
    """NOTE: a version that is too old is said in an event, inside an answer of 200, as the real one does."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    try:
        async with asyncio.timeout(float(asked.query.get("timeoutSeconds") or _LONGEST_S)):
            await _follow(response, asked, store, stopping)
    except ApiError as error:
        status = {
            "kind": "Status",
            "status": "Failure",
            "message": str(error),
            "reason": error.reason,
            "code": error.code,
        }
        await _send(response, ("ERROR", status))
    except TimeoutError:
        if asked.query.get("allowWatchBookmarks") == "true":
            await _send(response, ("BOOKMARK", _bookmark(asked, store.version)))
    if stopping.is_set() and request.transport is not None:
        request.transport.abort()
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
    return response


async def _follow(response: web.StreamResponse, asked: Asked, store: Store, stopping: asyncio.Event) -> None:
    version = int(asked.query.get("resourceVersion") or 0)
    if version == 0:
        version = store.version
        for found in store.list(asked.resource, asked.namespace):
            if asked.matches(found):
                await _send(response, ("ADDED", found))
    while not stopping.is_set():
        changed = store.changed
        for change in store.since(version):
            version = change.version
            for event in _events_of(asked, change):
                await _send(response, event)
        await _first_of(changed, stopping)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _events_of(asked: Asked, change: Change) -> Iterator[Event]:
    """An object that no longer matches is as good as deleted, one that begins to is as good as new."""
    if change.key[:2] != asked.key[:2]:
        return
    did = change.before is not None and asked.matches(change.before)
    does = change.after is not None and asked.matches(change.after)
    if does and change.after is not None:
        yield ("MODIFIED" if did else "ADDED", change.after)
    elif did and change.before is not None:
        meta = {**change.before["metadata"], "resourceVersion": str(change.version)}
        yield ("DELETED", {**change.before, "metadata": meta})


def _bookmark(asked: Asked, version: int) -> Mapping[str, Any]:
    return {"kind": KINDS[asked.resource], "apiVersion": "v1", "metadata": {"resourceVersion": str(version)}}


async def _send(response: web.StreamResponse, event: Event) -> None:
    kind, found = event
    await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
