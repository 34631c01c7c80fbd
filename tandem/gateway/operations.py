"""`GET /admin/overview`: the whole cluster on one page, cheap enough for many browsers that poll every two seconds.

Invariant: routers are asked at most once a second, whatever the number of clients. Reads only; holds no prompts or
answers.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tandem.core.clock import Clock, SystemClock
from tandem.gateway.admin import list_decisions, list_processes
from tandem.gateway.gateway import Gateway

KEPT_S = 1.0  # for which an overview is sent again
NUM_DECISIONS = 30  # latest routing decisions that are shown
MAX_LINKS = 256  # links between workers that are shown


class Overview:
    """The overview, cached for `KEPT_S` seconds and shared by all clients."""

    def __init__(self, gateway: Gateway, clock: Clock | None = None) -> None:
        self._gateway = gateway
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._body = b""
        self._made_s: float | None = None

    async def body(self, address: str) -> bytes:
        """The overview as JSON. `address`: under which the client reached this gateway."""
        async with self._lock:
            if self._made_s is None or self._clock.now_s() - self._made_s >= KEPT_S:
                self._body = orjson.dumps(await self._read(address))
                self._made_s = self._clock.now_s()
            return self._body

    async def _read(self, address: str) -> Mapping[str, Any]:
        listed, decided = await asyncio.gather(
            list_processes(self._gateway, address), list_decisions(self._gateway, NUM_DECISIONS)
        )
        entries = listed["workers"]
        recent = self._gateway.metrics.recent
        return {
            "at_s": time.time(),
            "model": _model(self._gateway),
            "live": recent.as_json(),
            "hour": recent.hour_as_json(),
            "processes": [_without_links(entry) for entry in entries],
            **_links(entries),
            "decisions": decided["decisions"],
        }


def _model(gateway: Gateway) -> Mapping[str, Any]:
    known = gateway.model_info.known
    shape = {} if known is None else {"max_model_len": known.max_model_len, "block_size": known.block_size}
    return {"name": gateway.model.name, **shape}


def _without_links(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in entry.items() if key != "links"}


def _links(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The slowest links, those marked slow first; beyond `MAX_LINKS` they are only counted."""
    found = [{"to": entry["worker_id"], **link} for entry in entries for link in entry.get("links", ())]
    found.sort(key=lambda link: (not link["is_slow"], link["bytes_per_s"]))
    return {"links": found[:MAX_LINKS], "num_links": len(found)}
