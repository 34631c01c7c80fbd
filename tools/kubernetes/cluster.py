"""A whole cluster on this machine for the time of a block: control plane, nodes, DNS, Services, and pods by podman."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tools.images.host import ensure_tools
from tools.kubernetes.api import Api, ApiError
from tools.kubernetes.control_plane import ControlPlane
from tools.kubernetes.host import HOST_ADDRESS, POD_SUBNET, Host, tell_failure
from tools.kubernetes.kubelet import Kubelet, NodeSpec
from tools.kubernetes.links import delete_links_with
from tools.kubernetes.podman import PodmanError, podman
from tools.kubernetes.services import Services


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
        mode: `podman`, or `instant` for pods that only say that they are ready.

    Raises:
        RuntimeError, CommandError: a tool is missing or refuses.
    """
    async with Api(plane.url, plane.admin_token, plane.ca_file) as api, contextlib.AsyncExitStack() as stack:
        services = None
        if mode == "podman":
            ensure_tools()
            services = await stack.enter_async_context(_pod_network(api, plane.ports.api, journal))
        host = Host(api, folder, _network(), services.objects if services else list, journal)
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
async def _pod_network(api: Api, api_port: int, journal: Callable[[str], None]) -> AsyncIterator[Services]:
    """The bridge of the pods, and the Services on it."""
    with _only_one():
        async with _bridge(api, api_port, journal) as services:
            yield services


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Addresses of pods and Services are the machine's, so there is one such cluster at a time."""
    with (Path(tempfile.gettempdir()) / "tandem-pods.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError("a cluster with podman pods runs on this machine already; stop it first") from error
        yield


@contextlib.asynccontextmanager
async def _bridge(api: Api, api_port: int, journal: Callable[[str], None]) -> AsyncIterator[Services]:
    await _remove_network()
    subnet = ("--subnet", str(POD_SUBNET), "--gateway", HOST_ADDRESS)
    await podman("network", "create", "--disable-dns", *subnet, _network())
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
        await _remove_network()


def _network() -> str:
    """NOTE: podman remembers the addresses of a network that was torn down by force, so each run has its own name."""
    return f"tandem-pods-{os.getpid()}"


async def _remove_network() -> None:
    """Take away the network, its containers, and the bridge; also what an interrupted run left behind."""
    with contextlib.suppress(PodmanError):
        for name in (await podman("network", "ls", "--filter", "name=^tandem-pods-", "--format", "{{.Name}}")).split():
            await podman("network", "rm", "--force", "--time", "0", name)
    await delete_links_with(HOST_ADDRESS)
