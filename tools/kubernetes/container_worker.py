"""One container of a pod: run, probed, restarted when it ends, stopped by preStop and what is left of the grace."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.kubernetes import probes
from tools.kubernetes.api import Object
from tools.kubernetes.environment import Sources, environment
from tools.kubernetes.pod_spec import Placement
from tools.kubernetes.pod_status import ContainerState, timestamp
from tools.kubernetes.podman import ContainerProcess, PodmanError
from tools.kubernetes.runtime import ContainerRuntime

_LAST_WORDS_S = 2.0
_KILL_S = 10.0
_SLOW_S = 5.0
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0)


class ContainerWorker:
    """Owns one container under one name. `changed` is called after every change of `state`."""

    def __init__(
        self,
        spec: Object,
        sources: Sources,
        where: Placement,
        runtime: ContainerRuntime,
        changed: Callable[[], None],
        journal: Callable[[str], None],
    ) -> None:
        self.state = ContainerState(spec["name"], spec["image"])
        self.is_running = False
        self._process: ContainerProcess | None = None
        self._spec = spec
        self._sources = sources
        self._where = where
        self._runtime = runtime
        self._changed = changed
        self._journal = journal
        self._stopping = False
        self._target = probes.Target(partial(runtime.execute, where.name), sources.pod_address, spec)

    async def run(self, restart_policy: str) -> int:
        """Run it, again and again where the policy says so; the last exit code."""
        for attempt in itertools.count():
            code = await self._once()
            if self._stopping or restart_policy == "Never" or (restart_policy == "OnFailure" and code == 0):
                return code
            self._forget(code)
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
        raise AssertionError("a count has no end")

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over."""
        self._stopping = True
        if not self.is_running:
            return
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        hook = self._spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook is not None and grace_s > 0:
            await asyncio.gather(
                self._runtime.execute(self._where.name, hook["command"], grace_s), return_exceptions=True
            )
        left_s = 0 if grace_s == 0 else max(_LAST_WORDS_S, grace_s - (loop.time() - begun_s))
        await self._end(left_s)

    async def _end(self, left_s: float) -> None:
        process = self._process
        assert process is not None
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(left_s):
                await process.ended.wait()
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.ended.wait()

    @property
    def ended_s(self) -> float | None:
        """Time at which its last process ended, by the loop's clock."""
        return None if self._process is None else self._process.ended_s

    async def remove(self, logs: Path) -> None:
        """Keep its log, forget the container."""
        try:
            logs.write_text(await self._runtime.log(self._where.name))
        except PodmanError:
            logs.write_text("no log")
        await self._runtime.remove(self._where.name)

    async def _once(self) -> int:
        try:
            await self._runtime.remove(self._where.name)
            if self._stopping:
                return 0
            values = environment(self._spec, self._sources)
            await self._runtime.start(self._sources.pod, self._spec, values, self._where)
        except (PodmanError, TimeoutError, LookupError) as error:
            self.state.message = str(error)
            self._journal(f"container {self._where.name} does not start: {error}")
            return 128
        self._process = ContainerProcess(Path(self._where.pid_file))
        self._began()
        watching = asyncio.create_task(self._watch())
        try:
            await self._process.ended.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._process.close()
        code = await self._runtime.exit_code(self._where.name)
        late_s = asyncio.get_running_loop().time() - (self._process.ended_s or 0.0)
        if late_s > _SLOW_S:
            self._journal(f"it was told {late_s:.1f} s late that container {self._where.name} had ended")
        self._ended(code)
        return code

    async def _watch(self) -> None:
        """Probe it for as long as it runs."""
        startup, readiness, liveness = (self._spec.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness"))
        if startup is not None and not await probes.first_turn(startup, self._target):
            await self._kill(f"startup probe failed: {probes.shown(startup)}")
            return
        self.state.started = True
        self._turn_ready(readiness is None)
        async with asyncio.TaskGroup() as group:
            if readiness is not None:
                group.create_task(probes.follow(readiness, self._target, self._turn_ready))
            if liveness is not None:
                group.create_task(self._live_or_kill(liveness))

    async def _live_or_kill(self, probe: Object) -> None:
        while await probes.first_turn(probe, self._target) or self._stopping:
            await asyncio.sleep(probe.get("periodSeconds", 10))
        await self._kill(f"liveness probe failed: {probes.shown(probe)}")

    async def _kill(self, why: str) -> None:
        self.state.message = why
        self._journal(f"container {self._where.name} is killed: {why}")
        await self._end(_KILL_S)

    def _turn_ready(self, ready: bool) -> None:
        if self.state.ready is not ready:
            self.state.ready = ready
            self._changed()

    def _began(self) -> None:
        self.is_running = True
        self.state.started_at, self.state.finished_at = timestamp(), None
        self.state.waiting = self.state.exit_code = None
        self.state.message = ""
        self._changed()

    def _ended(self, code: int) -> None:
        self.is_running = self.state.ready = self.state.started = False
        self.state.exit_code, self.state.finished_at = code, timestamp()
        self._changed()

    def _forget(self, code: int) -> None:
        """Make the last run history, before the next."""
        if self.state.exit_code is not None:
            self.state.last = self.state.state()
            self.state.num_restarts += 1
        self.state.exit_code = None
        self.state.waiting = "RunContainerError" if code == 128 else "CrashLoopBackOff"
        self._changed()
