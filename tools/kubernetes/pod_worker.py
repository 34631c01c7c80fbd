"""One pod from being bound to this machine until it is gone: volumes, init containers, containers, status, shutdown.

A pod that is being deleted is reported as not ready at once; its object goes only when none of its containers is left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tools.kubernetes.api import ApiError, Object
from tools.kubernetes.container_worker import ContainerWorker
from tools.kubernetes.environment import MissingReferenceError, Sources
from tools.kubernetes.host import HOST_ADDRESS, Host
from tools.kubernetes.pod_spec import Placement
from tools.kubernetes.pod_status import ContainerState, pod_status
from tools.kubernetes.publisher import Publisher
from tools.kubernetes.volumes import Volumes, read_references

_RETRY_S = 1.0


class PodWorker:
    """Runs one pod. `update` tells it how the object is now, None when it was taken away by force."""

    def __init__(self, pod: Object, host: Host) -> None:
        self._pod = pod
        self._host = host
        self._name = pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._address = host.addresses.take()
        self._folder = host.folder / "pods" / self._uid
        self._volumes = Volumes(host.api, self._folder / "volumes")
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{self._name}"
        self._publisher = Publisher(host.api, path, self._status)
        self._deleting = asyncio.Event()
        self._grace_s = 0.0
        self._initial: list[ContainerWorker] = []
        self._containers: list[ContainerWorker] = []
        self._waiting_for = ""

    def update(self, pod: Object | None) -> None:
        if pod is None:
            self._grace_s = 0.0
            self._deleting.set()
            return
        self._pod = pod
        if "deletionTimestamp" in pod["metadata"] and not self._deleting.is_set():
            self._grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            self._deleting.set()
        self._publisher.changed.set()

    async def run(self) -> None:
        """Its whole life. When cancelled it ends the containers without grace."""
        publishing = asyncio.create_task(self._publisher.run())
        life = asyncio.create_task(self._live())
        deleting = asyncio.create_task(self._deleting.wait())
        try:
            await asyncio.wait({life, deleting}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            await deleting
            await self._shut_down(life)
            await self._publisher.publish()
        finally:
            for task in (publishing, life, deleting):
                task.cancel()
            await asyncio.gather(publishing, life, deleting, return_exceptions=True)
            await self._clean_up()
        await self._publisher.remove(self._uid)

    async def _live(self) -> None:
        sources, volumes = await self._prepare()
        initial = self._pod["spec"].get("initContainers", [])
        self._initial = [self._worker(spec, sources, volumes, 0) for spec in initial]
        specs = self._pod["spec"]["containers"]
        self._containers = [self._worker(spec, sources, volumes, index) for index, spec in enumerate(specs)]
        policy = self._pod["spec"].get("restartPolicy", "Always")
        for worker in self._initial:
            code = await worker.run("Never" if policy == "Never" else "OnFailure")
            await worker.remove(self._log_file(worker.state.name))
            if code != 0:
                return
        async with asyncio.TaskGroup() as group:
            for worker in self._containers:
                group.create_task(worker.run(policy))

    async def _prepare(self) -> tuple[Sources, dict[str, str]]:
        """Volumes and what environments come from, as soon as all that the pod names is there."""
        while True:
            try:
                found = await read_references(self._host.api, self._pod)
                sources = Sources(
                    self._pod, self._address, HOST_ADDRESS, found["secrets"], found["configmaps"], self._host.services()
                )
                return sources, await self._volumes.make(sources)
            except (MissingReferenceError, ApiError) as error:
                if str(error) != self._waiting_for:
                    self._waiting_for = str(error)
                    self._host.journal(f"pod {self._name} waits: {error}")
                await asyncio.sleep(_RETRY_S)

    def _worker(self, spec: Object, sources: Sources, volumes: dict[str, str], index: int) -> ContainerWorker:
        name = f"{self._name}_{spec['name']}_{self._uid[:8]}"
        first = self._containers_name(0) if index > 0 else ""
        where = Placement(name, self._address, first, volumes, str(self._folder / f"{spec['name']}.pid"))
        runtime = self._host.runtime
        assert runtime is not None, "pods are run"
        return ContainerWorker(spec, sources, where, runtime, self._publisher.changed.set, self._host.journal)

    def _containers_name(self, index: int) -> str:
        return f"{self._name}_{self._pod['spec']['containers'][index]['name']}_{self._uid[:8]}"

    async def _shut_down(self, life: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._publisher.changed.set()
        workers = [*self._initial, *self._containers]
        were_running = [worker for worker in workers if worker.is_running]
        await asyncio.gather(*(worker.stop(self._grace_s) for worker in workers))
        if were_running and life in (await asyncio.wait({life}, timeout=30))[0]:
            codes = ", ".join(f"{one.state.name} exit {one.state.exit_code}" for one in were_running)
            took_s = max(one.ended_s or loop.time() for one in were_running) - begun_s
            self._host.journal(f"pod {self._name} stopped in {took_s:.1f} s of {self._grace_s:g} s grace: {codes}")

    async def _clean_up(self) -> None:
        for worker in [*self._initial, *self._containers]:
            await worker.remove(self._log_file(worker.state.name))
        self._host.addresses.give_back(self._address)
        self._volumes.remove()

    def _log_file(self, container: str) -> Path:
        logs = self._host.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{self._name}.{container}.log"

    def _status(self) -> Object:
        states = [worker.state for worker in self._containers] or [
            ContainerState(one["name"], one["image"]) for one in self._pod["spec"]["containers"]
        ]
        initial = [worker.state for worker in self._initial]
        addresses = (HOST_ADDRESS, self._address if self._containers else None)
        return pod_status(self._pod, states, initial, addresses, self._deleting.is_set())
