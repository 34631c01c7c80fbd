"""Tells the API server how a pod is, and that it is gone. What cannot be told now is told again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx

from tools.kubernetes.api import Api, ApiError, Object

_RETRY_S = 0.5


class Publisher:
    """Patches one pod's status whenever `changed` is set; the newest wins."""

    def __init__(self, api: Api, path: str, status: Callable[[], Object]) -> None:
        self.changed = asyncio.Event()
        self._api = api
        self._path = path
        self._status = status
        self._told = ""

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            await self.publish()

    async def publish(self) -> None:
        """Publish once, if something changed, until the API server has taken it or the pod is gone."""
        while True:
            status = self._status()
            if json.dumps(status) == self._told:
                return
            try:
                await self._api.patch(f"{self._path}/status", {"status": status})
                self._told = json.dumps(status)
            except ApiError as error:
                if error.status == 404:
                    return
                await asyncio.sleep(_RETRY_S)
            except httpx.HTTPError:
                await asyncio.sleep(_RETRY_S)

    async def remove(self, uid: str) -> None:
        """Delete the pod for good, now that nothing of it runs."""
        while True:
            try:
                await self._api.delete(self._path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
                return
            except ApiError as error:
                if error.status == 409:
                    return
                await asyncio.sleep(_RETRY_S)
            except httpx.HTTPError:
                await asyncio.sleep(_RETRY_S)
