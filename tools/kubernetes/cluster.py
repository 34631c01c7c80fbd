"""A whole cluster on this machine for the time of a block: control plane, nodes, DNS, Services, and pods by podman."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tools.kubernetes.api import Api, ApiError
from tools.kubernetes.control_plane import ControlPlane
from tools.kubernetes.host import Host, tell_failure
from tools.kubernetes.kubelet import Kubelet, NodeSpec
from tools.kubernetes.processes import ProcessRuntime
from tools.kubernetes.runtime import ContainerRuntime, PodmanRuntime
from tools.kubernetes.services import Services

RUNTIMES: dict[str, Callable[[], ContainerRuntime | None]] = {
    "podman": PodmanRuntime,
    "process": ProcessRuntime,
    "instant": lambda: None,
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Parts of the cluster that a test needs. `services` is None where pods are only played."""

    plane: ControlPlane
    api: Api
    services: Services | None
    folder: Path


def timed_print() -> Callable[[str], None]:
    """A journal: lines on the terminal, with the seconds since now."""
    begun_s = time.monotonic()
    return lambda line: print(f"{time.monotonic() - begun_s:7.1f} s  {line}", flush=True)


@contextlib.asynccontextmanager
async def running_cluster(
    plane: ControlPlane, folder: Path, journal: Callable[[str], None], mode: str = "podman", num_nodes: int = 2
) -> AsyncIterator[Cluster]:
    """Nodes and pods for a control plane that runs already.

    Args:
        folder: pods' volumes and logs; `folder/logs` keeps the log of every container that ended.
        journal: takes one line for each thing worth knowing.
        mode: `podman`; `process` for pods without images, see `processes`; `instant` for pods that only say that they
            are ready.

    Raises:
        RuntimeError, CommandError: a tool is missing or refuses.
    """
    async with Api(plane.url, plane.admin_token, plane.ca_file) as api, contextlib.AsyncExitStack() as stack:
        services, runtime = None, RUNTIMES[mode]()
        if runtime is not None:
            runtime.check()
            services = await stack.enter_async_context(_pod_network(api, plane.ports.api, runtime, journal))
        host = Host(api, folder, runtime, services.objects if services else list, journal)
        kubelet = Kubelet(host, [NodeSpec(f"node-{index}") for index in range(1, num_nodes + 1)], mode)
        await kubelet.register()
        running = asyncio.create_task(kubelet.run())
        running.add_done_callback(lambda task: tell_failure(task, "the kubelet", journal))
        try:
            yield Cluster(plane, api, services, folder)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            with contextlib.suppress(ApiError, httpx.HTTPError):
                await kubelet.unregister()


@contextlib.asynccontextmanager
async def _pod_network(
    api: Api, api_port: int, runtime: ContainerRuntime, journal: Callable[[str], None]
) -> AsyncIterator[Services]:
    """The bridge of the pods, and the Services on it."""
    with _only_one():
        async with _bridge(api, api_port, runtime, journal) as services:
            yield services


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Addresses of pods and Services are the machine's, so there is one such cluster at a time."""
    with (Path(tempfile.gettempdir()) / "tandem-pods.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError("a cluster with pods runs on this machine already; stop it first") from error
        yield


@contextlib.asynccontextmanager
async def _bridge(
    api: Api, api_port: int, runtime: ContainerRuntime, journal: Callable[[str], None]
) -> AsyncIterator[Services]:
    await runtime.make_network()
    services = Services(api, api_port)
    serving = asyncio.create_task(services.run())
    serving.add_done_callback(lambda task: tell_failure(task, "DNS and Services", journal))
    ready = asyncio.create_task(services.ready.wait())
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield services
    finally:
        for task in (serving, ready):
            task.cancel()
        await asyncio.gather(serving, ready, return_exceptions=True)
        await runtime.remove_network()
