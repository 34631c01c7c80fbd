"""Choice of the transport for a pair of workers, with the reason. Pure, except `Site.here`, which inspects the machine.

`inproc` copies within a process, `cma` between processes of one user on one host, `nixl` reads over RDMA or CUDA IPC,
`tcp` over the network. CPU blocks of one host are copied without NIXL, which adds nothing there. NIXL is chosen if its
reads are truly one-sided; where UCX would emulate them over TCP, our own TCP transport is faster and safer.
"""

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tandem.core.errors import ConfigurationError, IncompatiblePeerError
from tandem.transport.nixl.bindings import rdma_ports, unavailable_reason

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"
AUTO = "auto"
TRANSPORTS = ("inproc", "cma", "nixl", "tcp")


class LinkPath(StrEnum):
    """Medium that carries the bytes."""

    INPROC = "inproc"
    CMA = "cma: memory of another process of this host"
    NIXL_CMA = "nixl: memory of another process of this host"
    CUDA_IPC = "nixl: cuda ipc"
    RDMA = "nixl: rdma"
    UNKNOWN_NIXL = "nixl: whatever ucx finds"
    LOOPBACK = "tcp: this host"
    NETWORK = "tcp: network"


@dataclass(frozen=True, slots=True)
class Site:
    """Location and abilities of a worker, exchanged in the handshake of the layers above.

    Args:
        host: equal for processes under one kernel.
        pid_namespace: processes can address each other by id only within one.
        user: processes can read each other's memory only as the same user.
        process: equal only for the same process.
        device: device of its pool, "cpu" or "cuda:N".
        nixl: reason why NIXL is not available there; "" if it is.
        has_rdma: whether it has an RDMA device.
    """

    host: str
    pid_namespace: str
    user: str
    process: str
    device: str
    nixl: str
    has_rdma: bool

    @staticmethod
    def here(device: str) -> "Site":
        """Returns the site of this process."""
        return Site(
            host=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname(),
            pid_namespace=_link("/proc/self/ns/pid"),
            user=f"{_link('/proc/self/ns/user')} {os.geteuid()}",
            process=str(os.getpid()),
            device=device,
            nixl=unavailable_reason() or "",
            has_rdma=bool(rdma_ports()),
        )

    def to_fields(self) -> dict[str, str | bool]:
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, object]) -> "Site":
        """Raises `IncompatiblePeerError` when these are not a site's fields."""
        texts = [name for name in Site.__dataclass_fields__ if name != "has_rdma"]
        if not all(isinstance(fields.get(name), str) for name in texts) or not isinstance(fields.get("has_rdma"), bool):
            raise IncompatiblePeerError(f"a peer describes its site as {dict(fields)!r:.200}; need {', '.join(texts)}")
        return Site(**{name: str(fields[name]) for name in texts}, has_rdma=fields["has_rdma"] is True)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Name of a transport, the medium that will carry the bytes, and the reason for the choice."""

    name: str
    path: LinkPath
    reason: str


def choose(local: Site, remote: Site, override: str = AUTO, offered: Collection[str] = TRANSPORTS) -> TransportChoice:
    """Returns the fastest transport that is safe for this pair.

    Args:
        override: the name of one transport, or "auto".
        offered: names of the transports by which the peer can be read, for "auto".

    Raises:
        ConfigurationError: the override is unknown or cannot work, or nothing can; the message says why.
    """
    if override not in (AUTO, *TRANSPORTS):
        raise ConfigurationError(f"transport={override!r} is unknown; choose {AUTO} or one of {', '.join(TRANSPORTS)}")
    rules = {"inproc": _inproc, "cma": _cma, "nixl": _nixl, "tcp": _tcp}
    candidates = {name: rule(local, remote) for name, rule in rules.items()}
    if override != AUTO:
        chosen = candidates[override]
        if isinstance(chosen, TransportChoice):
            return TransportChoice(chosen.name, chosen.path, f"set by hand; {chosen.reason}")
        if override == "nixl" and not (local.nixl or remote.nixl):
            return TransportChoice("nixl", LinkPath.UNKNOWN_NIXL, f"set by hand, although {chosen}")
        raise ConfigurationError(f"transport={override} cannot serve this pair: {chosen}")
    candidates |= {name: f"no {name}: the peer does not offer it" for name in rules if name not in offered}
    for candidate in candidates.values():
        if isinstance(candidate, TransportChoice):
            refused = [why for why in candidates.values() if isinstance(why, str)]
            return TransportChoice(candidate.name, candidate.path, "; ".join([candidate.reason, *refused]))
    raise ConfigurationError(f"no transport can serve this pair: {'; '.join(map(str, candidates.values()))}")


def _inproc(local: Site, remote: Site) -> TransportChoice | str:
    if (local.host, local.pid_namespace, local.process) != (remote.host, remote.pid_namespace, remote.process):
        return "no inproc: two processes"
    if not _both_cpu(local, remote):
        return f"no inproc: it copies cpu memory, not {local.device} and {remote.device}"
    return TransportChoice("inproc", LinkPath.INPROC, "one process")


def _cma(local: Site, remote: Site) -> TransportChoice | str:
    if not _both_cpu(local, remote):
        return f"no cma: it copies cpu memory, not {local.device} and {remote.device}"
    if local.host != remote.host:
        return "no cma: two hosts"
    if not _may_read(local, remote):
        return "no cma: one host, but other users or pid namespaces, so no process may read another's memory"
    return TransportChoice("cma", LinkPath.CMA, "one host, processes that may read each other's memory")


def _nixl(local: Site, remote: Site) -> TransportChoice | str:
    for side, site in (("here", local), ("at the peer", remote)):
        if site.nixl:
            return f"no nixl: {side}, {site.nixl}"
    if (local.device == "cpu") != (remote.device == "cpu"):
        return f"no nixl: blocks live in {local.device} here and in {remote.device} at the peer"
    if local.host == remote.host:
        if _may_read(local, remote):
            path = LinkPath.NIXL_CMA if _both_cpu(local, remote) else LinkPath.CUDA_IPC
            return TransportChoice("nixl", path, "one host, processes that may read each other's memory")
        if not (local.has_rdma and remote.has_rdma):
            return "no nixl: one host, but other users or pid namespaces, so no process may read another's memory"
    if local.has_rdma and remote.has_rdma:
        return TransportChoice("nixl", LinkPath.RDMA, "both sides have RDMA devices")
    return "no nixl: two hosts without RDMA devices on both, where its reads would be emulated over TCP"


def _tcp(local: Site, remote: Site) -> TransportChoice | str:
    if not _both_cpu(local, remote):
        return f"no tcp: it sends cpu memory, not {local.device} and {remote.device}"
    if local.host == remote.host:
        return TransportChoice("tcp", LinkPath.LOOPBACK, "one host")
    return TransportChoice("tcp", LinkPath.NETWORK, "two hosts")


def _may_read(local: Site, remote: Site) -> bool:
    """Whether the kernel lets two processes on one host read each other's memory."""
    is_known = local.pid_namespace != _UNKNOWN
    return is_known and (local.pid_namespace, local.user) == (remote.pid_namespace, remote.user)


def _both_cpu(local: Site, remote: Site) -> bool:
    return local.device == remote.device == "cpu"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return _UNKNOWN
