"""Resources that all pods of one machine share: the API, the bridge, free addresses, a folder, and a journal."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tools.kubernetes.api import Api, Object
from tools.kubernetes.control_plane import DNS_ADDRESS

if TYPE_CHECKING:
    from tools.kubernetes.runtime import ContainerRuntime

POD_SUBNET = ipaddress.ip_network("10.244.0.0/24")
HOST_ADDRESS = str(POD_SUBNET[1])


class AddressPool:
    """Addresses of pods. One given back is used again as late as can be."""

    def __init__(self) -> None:
        self._free = [str(address) for address in POD_SUBNET.hosts()][9:]

    def take(self) -> str:
        return self._free.pop(0)

    def give_back(self, address: str) -> None:
        self._free.append(address)


@dataclass(frozen=True, slots=True)
class Host:
    """Given to every pod worker.

    Args:
        folder: for volumes and logs.
        runtime: runs containers; None where pods are only played.
        services: those of all namespaces, as they are now.
        journal: takes one line of plain words.
    """

    api: Api
    folder: Path
    runtime: ContainerRuntime | None
    services: Callable[[], list[Object]]
    journal: Callable[[str], None]
    addresses: AddressPool = field(default_factory=AddressPool)


def search_domains(namespace: str) -> list[str]:
    """Of pods of a namespace."""
    return [f"{namespace}.svc.cluster.local", "svc.cluster.local", "cluster.local"]


def network_arguments(network: str, pod: Object, address: str) -> list[str]:
    """Network of a pod's first container: its address, its name, the cluster's DNS."""
    searched = search_domains(pod["metadata"]["namespace"])
    name = (pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]
    flags = [
        "--network",
        f"{network}:ip={address}",
        "--hostname",
        name,
        "--dns",
        DNS_ADDRESS,
        "--dns-option",
        "ndots:5",
    ]
    return flags + [flag for domain in searched for flag in ("--dns-search", domain)]


def tell_failure(task: asyncio.Task[None], what: str, journal: Callable[[str], None]) -> None:
    """Tell the journal when a task has failed; for its done callback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        journal(f"{what} failed: {error!r}")
