"""One container of a podman network: started from a spec, looked at, hurt and ended. Owns nothing beyond its name.

Every container runs hardened: no capabilities, no new privileges and, unless its spec says otherwise, a read-only
root.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.images.command import CommandError
from tools.images.host import podman
from tools.images.network import Network


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """Command of a container and its resources.

    Args:
        argv: the arguments of the image's entrypoint; () = the image's own.
        entrypoint: a program that replaces the image's entrypoint.
        mounts: host paths by path in the container, with ":ro" where it may not write.
        tmpfs: writable folders in memory; /tmp is always one.
        aliases: more names on the network; several containers may share one.
        cpus, memory: limits, "512m" or "1g"; None = none.
        user: uid:gid that replaces the image's.
        labels: to find containers by.
    """

    name: str
    image: str
    network: str
    argv: Sequence[str] = ()
    entrypoint: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    tmpfs: Sequence[str] = ()
    aliases: Sequence[str] = ()
    ip: str | None = None
    cpus: float | None = None
    memory: str | None = None
    user: str | None = None
    read_only: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    hostname: str | None = None

    def arguments(self) -> list[str]:
        """Of `podman run`."""
        flags = ["--detach", "--name", self.name, "--network", self.network]
        flags += ["--cap-drop", "all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:mode=1777"]
        options: list[tuple[str, object]] = [
            ("--entrypoint", None if self.entrypoint is None else json.dumps([self.entrypoint])),
            ("--ip", self.ip),
            ("--cpus", self.cpus),
            ("--memory", self.memory),
            ("--user", self.user),
            ("--hostname", self.hostname),
        ]
        options += [("--env", f"{name}={value}") for name, value in self.env.items()]
        options += [("--volume", f"{source}:{target}") for source, target in _volumes(self.mounts)]
        options += [("--tmpfs", f"{path}:mode=1777") for path in self.tmpfs]
        options += [("--network-alias", alias) for alias in self.aliases]
        options += [("--label", f"{name}={value}") for name, value in self.labels.items()]
        flags += [text for flag, value in options if value is not None for text in (flag, str(value))]
        return [*flags, *(("--read-only",) if self.read_only else ()), self.image, *self.argv]


@dataclass(frozen=True, slots=True)
class ContainerState:
    """State of it according to podman. `exit_code` counts only when it no longer runs; `ip` is "" while unplugged."""

    status: str
    exit_code: int
    pid: int
    ip: str
    oom_killed: bool

    @property
    def is_running(self) -> bool:
        return self.status == "running"


class Container:
    """A container that was started. Every call raises `CommandError` when podman fails."""

    def __init__(self, name: str, network: str) -> None:
        self.name = name
        self.network = network

    @staticmethod
    def start(spec: ContainerSpec) -> "Container":
        """Start it; returns as soon as its process runs, ready or not. One of the same name is removed first."""
        podman("rm", "--force", "--ignore", "--time", "0", spec.name)
        podman("run", *spec.arguments(), timeout_s=120)
        Network(spec.network).steady()
        return Container(spec.name, spec.network)

    def state(self) -> ContainerState:
        found: dict[str, Any] = json.loads(podman("container", "inspect", self.name))[0]
        networks: dict[str, Any] = found["NetworkSettings"]["Networks"] or {}
        return ContainerState(
            status=found["State"]["Status"],
            exit_code=found["State"]["ExitCode"],
            pid=found["State"]["Pid"],
            ip=networks.get(self.network, {}).get("IPAddress", ""),
            oom_killed=found["State"]["OOMKilled"],
        )

    def ip(self) -> str:
        """Its address on the network; "" while unplugged."""
        return self.state().ip

    def logs(self, tail: int | None = None) -> str:
        """Text that it wrote to both outputs, the last `tail` lines of it."""
        return podman("logs", *(() if tail is None else ("--tail", str(tail))), self.name, with_errors=True)

    def is_healthy(self) -> bool:
        """Result of the image's health check, run now."""
        try:
            podman("healthcheck", "run", self.name)
        except CommandError as error:
            if error.returncode == 1:
                return False
            raise
        return True

    def exec(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Output of a program run inside."""
        return podman("exec", self.name, *argv, timeout_s=timeout_s)

    def kill(self, signal: str = "KILL") -> None:
        podman("kill", "--signal", signal, self.name)

    def pause(self) -> None:
        """Freeze every process of it, as a machine that hangs does."""
        podman("pause", self.name)

    def unpause(self) -> None:
        podman("unpause", self.name)

    def stop(self, grace_s: int) -> int:
        """SIGTERM, and SIGKILL `grace_s` later if it still runs; the exit code."""
        podman("stop", "--time", str(grace_s), self.name, timeout_s=grace_s + 60)
        return self.state().exit_code

    def remove(self) -> None:
        """Kill it if it runs and forget it; nothing happens when there is none."""
        podman("rm", "--force", "--ignore", "--time", "0", self.name)


def _volumes(mounts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Targets with their sources' ":ro" moved to the end, as podman wants it."""
    return [
        (source.removesuffix(":ro"), f"{target}:ro" if source.endswith(":ro") else target)
        for target, source in mounts.items()
    ]
