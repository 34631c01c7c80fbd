"""Containers as plain processes of this machine, each in a network namespace of its own; for machines without podman.

They have the pod's address, environment, command and DNS, and this checkout in place of an image. What an image and its
security context would hold them to is not there: no limits, no file system, user or process ids of their own. A
volume is named by its folder here, wherever the environment or the command names its mount.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.compute.native.build import default_cache_dir
from tools.kubernetes.api import Object
from tools.kubernetes.control_plane import DNS_ADDRESS
from tools.kubernetes.environment import expand
from tools.kubernetes.host import HOST_ADDRESS, POD_SUBNET, search_domains
from tools.kubernetes.links import delete_links_with, ip
from tools.kubernetes.pod_spec import MEMORY_VOLUME, Placement
from tools.kubernetes.podman import PodmanError

ROOT = Path(__file__).parents[2]
_BRIDGE, _PREFIX = "tandem-pods", "tandem-pod-"
_OWN_FOLDERS = ("/tmp", "/dev/shm")  # as this machine has them
_KEPT_VARIABLES = ("HOME", "LANG")


@dataclass(frozen=True, slots=True)
class Translation:
    """Translates a container's commands into commands that run here.

    Args:
        environment: all of it.
        mounts: the folder of each path in the container.
    """

    environment: Mapping[str, str]
    mounts: Mapping[str, str]

    def command(self, words: Sequence[str]) -> list[str]:
        """With this checkout's Python, and folders in the place of mounts."""
        found = [located(word, self.mounts) for word in words]
        return [sys.executable, *found[1:]] if found[0].startswith("python") else found


@dataclass(frozen=True, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    namespace: str
    translation: Translation
    log: Path


class ProcessRuntime:
    """Implements `ContainerRuntime` for pods of one container. Wants root."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def check(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise RuntimeError("pods as processes want root and the `ip` command (iproute2)")

    async def make_network(self) -> None:
        await self.remove_network()
        await _ip("link", "add", _BRIDGE, "type", "bridge")
        await _ip("address", "add", f"{HOST_ADDRESS}/{POD_SUBNET.prefixlen}", "dev", _BRIDGE)
        await _ip("link", "set", _BRIDGE, "up")

    async def remove_network(self) -> None:
        for name in list(self._running):
            await self.remove(name)
        _, listing = await ip("netns", "list")
        for line in listing.splitlines():
            if line.startswith(_PREFIX):
                await _remove_namespace(line.split()[0])
        await delete_links_with(HOST_ADDRESS)

    async def start(self, pod: Object, spec: Object, values: Mapping[str, str], where: Placement) -> None:
        if where.first:
            raise PodmanError("pods as processes have one container")
        number = where.address.rpartition(".")[2]
        namespace = f"{_PREFIX}{number}"
        await _make_namespace(namespace, number, where.address, pod["metadata"]["namespace"])
        translation = translation_of(spec, values, where.volumes)
        command = translation.command([expand(word, values) for word in [*spec["command"], *spec.get("args", [])]])
        log = Path(where.pid_file).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", namespace, *command),
                env=translation.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        Path(where.pid_file).write_text(str(process.pid))  # NOTE: `ip` becomes the command
        self._running[where.name] = _Running(process, namespace, translation, log)

    async def execute(self, name: str, command: list[str], timeout_s: float) -> None:
        found = self._running[name]
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", found.namespace, *found.translation.command(command)),
            env=found.translation.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if code:
            raise PodmanError(f"{command[0]} ended with {code} in {name}")

    async def exit_code(self, name: str) -> int:
        """NOTE: what a process has started ends with it, as in a container."""
        found = self._running[name]
        code = await found.process.wait()
        _end_group(found.process.pid)
        return code if code >= 0 else 128 - code

    async def log(self, name: str) -> str:
        found = self._running.get(name)
        return "no log" if found is None else found.log.read_text(errors="replace")

    async def remove(self, name: str) -> None:
        found = self._running.pop(name, None)
        if found is not None:
            _end_group(found.process.pid)
            await found.process.wait()
            await _remove_namespace(found.namespace)


def translation_of(spec: Object, values: Mapping[str, str], volumes: Mapping[str, str]) -> Translation:
    """Of a container with this environment and its volumes' folders.

    NOTE: images bring compiled kernels, and pods have a home of their own: here they are where this machine has them.
    """
    mounts = {
        one["mountPath"]: volumes[one["name"]] + (f"/{one['subPath']}" if "subPath" in one else "")
        for one in spec.get("volumeMounts", [])
        if one["mountPath"] not in _OWN_FOLDERS and not volumes[one["name"]].startswith(MEMORY_VOLUME)
    }
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {name: located(value, mounts) for name, value in values.items()}
    here = {"TANDEM_CACHE_DIR": str(default_cache_dir())}
    return Translation({**kept, "PATH": path, "PYTHONPATH": str(ROOT), **own, **here}, mounts)


def located(text: str, mounts: Mapping[str, str]) -> str:
    """The text with the folder in the place of each mount that it names."""
    if not mounts:
        return text
    longest_first = sorted(mounts, key=len, reverse=True)
    pattern = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w.-])"
    return re.sub(pattern, lambda match: mounts[match[0]], text)


async def _make_namespace(name: str, number: str, address: str, namespace: str) -> None:
    """A network with this address on the bridge, and the cluster's DNS."""
    await _remove_namespace(name)
    folder = Path("/etc/netns") / name
    folder.mkdir(parents=True, exist_ok=True)
    searched = " ".join(search_domains(namespace))
    (folder / "resolv.conf").write_text(f"nameserver {DNS_ADDRESS}\nsearch {searched}\noptions ndots:5\n")
    ours, theirs = f"pod{number}", f"pod{number}in"
    await _ip("netns", "add", name)
    await _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
    await _ip("link", "set", ours, "master", _BRIDGE, "up")
    await _ip("link", "set", theirs, "netns", name)
    for words in (
        ("address", "add", f"{address}/{POD_SUBNET.prefixlen}", "dev", theirs),
        ("link", "set", theirs, "up"),
        ("link", "set", "lo", "up"),
        ("route", "add", "default", "via", HOST_ADDRESS),
    ):
        await _ip("-n", name, *words)


async def _remove_namespace(name: str) -> None:
    await ip("netns", "delete", name)
    await ip("link", "delete", f"pod{name.removeprefix(_PREFIX)}")  # NOTE: one that is not deleted yet
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


async def _ip(*arguments: str) -> None:
    code, words = await ip(*arguments)
    if code:
        raise PodmanError(f"ip {' '.join(arguments)}: {words.strip()}")


def _end_group(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
