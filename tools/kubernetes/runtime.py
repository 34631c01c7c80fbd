"""Seam between pods and what runs their containers, and podman's side of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Protocol

from tools.images.host import ensure_tools
from tools.kubernetes.api import Object
from tools.kubernetes.host import HOST_ADDRESS, POD_SUBNET, network_arguments
from tools.kubernetes.links import delete_links_with
from tools.kubernetes.pod_spec import Placement, run_arguments
from tools.kubernetes.podman import PodmanError, podman


class ContainerRuntime(Protocol):
    """Runs containers by name, on a bridge of its own. Calls raise PodmanError where they cannot be done."""

    def check(self) -> None:
        """Raises RuntimeError or CommandError where this machine cannot run containers."""
        ...

    async def make_network(self) -> None:
        """Also takes away what an interrupted run has left."""
        ...

    async def remove_network(self) -> None: ...

    async def start(self, pod: Object, spec: Object, values: Mapping[str, str], where: Placement) -> None:
        """Starts one with this environment; then `where.pid_file` says which is its first process."""
        ...

    async def execute(self, name: str, command: list[str], timeout_s: float) -> None:
        """Runs a command inside to its end, which must be good."""
        ...

    async def exit_code(self, name: str) -> int:
        """Of one that has ended, as a shell tells it."""
        ...

    async def log(self, name: str) -> str: ...

    async def remove(self, name: str) -> None:
        """By force. Harmless where there is none."""
        ...


class PodmanRuntime:
    """Implements `ContainerRuntime`.

    NOTE: podman remembers the addresses of a network that was torn down by force, so each run has its own name.
    """

    def __init__(self) -> None:
        self._network = f"tandem-pods-{os.getpid()}"

    def check(self) -> None:
        ensure_tools()

    async def make_network(self) -> None:
        await self.remove_network()
        subnet = ("--subnet", str(POD_SUBNET), "--gateway", HOST_ADDRESS)
        await podman("network", "create", "--disable-dns", *subnet, self._network)

    async def remove_network(self) -> None:
        with contextlib.suppress(PodmanError):
            names = await podman("network", "ls", "--filter", "name=^tandem-pods-", "--format", "{{.Name}}")
            for name in names.split():
                await podman("network", "rm", "--force", "--time", "0", name)
        await delete_links_with(HOST_ADDRESS)

    async def start(self, pod: Object, spec: Object, values: Mapping[str, str], where: Placement) -> None:
        joined = f"container:{where.first}"
        network = ["--network", joined] if where.first else network_arguments(self._network, pod, where.address)
        await podman("run", *network, *run_arguments(pod, spec, values, where))

    async def execute(self, name: str, command: list[str], timeout_s: float) -> None:
        await podman("exec", name, *command, timeout_s=timeout_s)

    async def exit_code(self, name: str) -> int:
        return int(await podman("wait", name))

    async def log(self, name: str) -> str:
        return await podman("logs", name, with_errors=True)

    async def remove(self, name: str) -> None:
        await podman("rm", "--force", "--ignore", "--time", "0", name)
