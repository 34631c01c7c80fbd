"""A pod that needs no container: ready as soon as it is bound, gone as soon as it is deleted."""

from __future__ import annotations

import asyncio

from tools.kubernetes.api import Object
from tools.kubernetes.host import HOST_ADDRESS, Host
from tools.kubernetes.pod_status import ContainerState, pod_status, timestamp
from tools.kubernetes.publisher import Publisher


class InstantWorker:
    """Plays one pod. Nothing listens at the address it reports."""

    def __init__(self, pod: Object, host: Host) -> None:
        self._pod = pod
        self._host = host
        self._address = host.addresses.take()
        self._deleting = asyncio.Event()
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self._publisher = Publisher(host.api, path, self._status)
        self._started_at = timestamp()

    def update(self, pod: Object | None) -> None:
        self._pod = pod or self._pod
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            self._deleting.set()

    async def run(self) -> None:
        """Its whole life."""
        try:
            await self._publisher.publish()
            await self._deleting.wait()
            await self._publisher.remove(self._pod["metadata"]["uid"])
        finally:
            self._host.addresses.give_back(self._address)

    def _status(self) -> Object:
        states = [
            ContainerState(
                one["name"], one["image"], started_at=self._started_at, waiting=None, ready=True, started=True
            )
            for one in self._pod["spec"]["containers"]
        ]
        return pod_status(self._pod, states, [], (HOST_ADDRESS, self._address), stopping=False)
