"""Startup, readiness and liveness probes of one container: HTTP, TCP or a command inside it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from tools.kubernetes.api import Object
from tools.kubernetes.podman import PodmanError


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a probe: what runs a command in a container within so many seconds, the pod's address, and the
    container's spec for its named ports.
    """

    execute: Callable[[list[str], float], Awaitable[None]]
    address: str
    spec: Object

    def port(self, port: int | str) -> int:
        """A port by number or name."""
        if isinstance(port, int) or str(port).isdecimal():
            return int(port)
        named = {one["name"]: int(one["containerPort"]) for one in self.spec.get("ports", []) if "name" in one}
        return named[port]


async def passes(probe: Object, target: Target) -> bool:
    """Whether one attempt succeeds within the probe's timeout."""
    timeout_s = probe.get("timeoutSeconds", 1)
    try:
        async with asyncio.timeout(timeout_s):
            return await _attempt(probe, target, timeout_s)
    except (TimeoutError, OSError, httpx.HTTPError, KeyError, PodmanError):
        return False


async def _attempt(probe: Object, target: Target, timeout_s: float) -> bool:
    if "exec" in probe:
        await target.execute(probe["exec"]["command"], timeout_s)
        return True
    if "tcpSocket" in probe:
        _, writer = await asyncio.open_connection(target.address, target.port(probe["tcpSocket"]["port"]))
        writer.close()
        return True
    asked = probe["httpGet"]
    url = (
        f"{asked.get('scheme', 'HTTP').lower()}://{target.address}:{target.port(asked['port'])}{asked.get('path', '/')}"
    )
    headers = {one["name"]: one["value"] for one in asked.get("httpHeaders", [])}
    async with httpx.AsyncClient(verify=False, timeout=timeout_s, trust_env=False) as client:
        response = await client.get(url, headers=headers)
    return 200 <= response.status_code < 400


async def follow(probe: Object, target: Target, turned: Callable[[bool], None]) -> None:
    """Probe for ever; `turned` hears True after enough successes in a row, False after enough failures."""
    needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
    last: bool | None = None
    in_a_row = 0
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        result = await passes(probe, target)
        in_a_row = in_a_row + 1 if result is last else 1
        last = result
        if in_a_row >= needed[result]:
            turned(result)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def first_turn(probe: Object, target: Target) -> bool:
    """Probe until it is decided: True = passed, False = failed for good."""
    decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def decide(result: bool) -> None:
        if not decided.done():
            decided.set_result(result)

    task = asyncio.create_task(follow(probe, target, decide))
    try:
        return await decided
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shown(probe: Object) -> str:
    """A probe in few words, for events."""
    if "exec" in probe:
        return shlex.join(probe["exec"]["command"])[:80]
    return str(probe.get("httpGet") or probe.get("tcpSocket"))
