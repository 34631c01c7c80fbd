"""Keeps one process running: starts it, reads its output, probes it, restarts it after a crash, and stops it.

`supervisor` does this for a set of processes. Invariant: after `run` has returned or raised, the process and all that
it started have ended, and its pipe is closed.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

from tandem.core.errors import ConfigurationError, TandemError, UnavailableError
from tandem.process.child import launch_command
from tandem.process.probe import get
from tandem.process.process_spec import ProcessSpec, RestartPolicy

CONFIGURATION_EXIT = 2  # exit code of a process whose settings were refused
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_PROBE_TIMEOUT_S = 2.0
_LAST_WORDS_S = 1.0  # time for reading the rest of a dead process's output

Output = Callable[[str, str], None]


class StartError(TandemError):
    """A process never became ready. `exit_code`: the code with which the supervisor should end."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ProcessState(StrEnum):
    """State of a supervised process."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # died, to be started again
    ENDED = "ended"


class Supervised:
    """Keeps the process of one spec running.

    Args:
        output: called in the event loop with the process's name and each line that it writes; must not block.
        report: called in the event loop with messages about what happened to it.
    """

    def __init__(self, spec: ProcessSpec, policy: RestartPolicy, output: Output, report: Callable[[str], None]) -> None:
        self.spec = spec
        self.state = ProcessState.STARTING
        self.num_starts = 0
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self._policy = policy
        self._output = output
        self._report = report
        self._stopping = asyncio.Event()
        self._is_last = asyncio.Event()  # set: its present life is
        self._process: asyncio.subprocess.Process | None = None
        self._was_ready = False
        self._last_lines: deque[str] = deque(maxlen=3)

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Runs the process, and again after each crash, until it is stopped.

        Raises:
            StartError: its first start failed for its configuration, or too many did for any reason.
        """
        num_deaths = 0
        try:
            while not self._is_last.is_set():
                started_s = _now_s()
                code = await self._live()
                if self._is_last.is_set():
                    self._tell_end(code)
                    return
                num_deaths = 1 if _now_s() - started_s >= self._policy.settled_s else num_deaths + 1
                self._judge(code)
                await self._pause(code, self._policy.delay_s(num_deaths))
        finally:
            self.state = ProcessState.ENDED
            self.ready.clear()
            self.ended.set()

    def start_no_more(self) -> None:
        """Prevents further starts; the process runs on."""
        self._is_last.set()

    async def stop(self) -> bool:
        """Asks the process to end and waits; kills it after the grace time. Returns whether it ended by itself."""
        self.start_no_more()
        self._stopping.set()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._policy.grace_s):
                await self.ended.wait()
            return True
        except TimeoutError:
            self._report(f"{self.spec.name} did not end within {self._policy.grace_s:g} s: killed")
            self.kill()
            await self.ended.wait()
            return False

    def kill(self) -> None:
        """Kills the process now (SIGKILL) and prevents further starts."""
        self.start_no_more()
        self._stopping.set()
        self._signal_group(signal.SIGKILL)

    def _judge(self, code: int) -> None:
        """Raises `StartError` if restarting the process is pointless."""
        if self._was_ready:
            return
        last_line = f": {self._last_lines[-1]}" if self._last_lines else ""
        if code == CONFIGURATION_EXIT:
            raise StartError(f"{self.spec.name} cannot start{last_line}", CONFIGURATION_EXIT)
        if self.num_starts >= self._policy.max_failed_starts:
            raise StartError(f"{self.spec.name} died {self.num_starts} times before it was ready{last_line}", 1)

    def _tell_end(self, code: int) -> None:
        """Reports an unexpected end after which the process is not started again."""
        if code and not self._stopping.is_set():
            self._report(f"{self.spec.name} died ({_described(code)})")

    async def _pause(self, code: int, delay_s: float) -> None:
        self.state = ProcessState.WAITING
        self._report(f"{self.spec.name} died ({_described(code)}); starting it again in {delay_s:.1f} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._is_last.wait()

    async def _live(self) -> int:
        """Runs the process once; returns its exit code, negative for a signal."""
        self.state = ProcessState.STARTING
        self.num_starts += 1
        async with self._spawned() as (process, read_end):
            helpers = [asyncio.create_task(self._listen(read_end)), asyncio.create_task(self._watch())]
            try:
                return await process.wait()
            finally:
                self._signal_group(signal.SIGKILL)  # with all processes that it has started
                await process.wait()
                helpers[1].cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await helpers[0]
                await asyncio.gather(*helpers, return_exceptions=True)
                self.ready.clear()

    @contextlib.asynccontextmanager
    async def _spawned(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
        read_end, write_end = os.pipe()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, read_end)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *launch_command(self.spec.argv, self.spec.cpus),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    env=self._environment(),
                    process_group=0,
                )
            finally:
                os.close(write_end)
            on_failure.pop_all()
        if self._stopping.is_set():  # asked for between the decision to start and the start
            self._signal_group(signal.SIGKILL)
        try:
            yield self._process, read_end
        finally:
            self._process = None

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self.spec.without_env}
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.spec.env}

    async def _listen(self, read_end: int) -> None:
        """Passes on the process's output, line by line, until it and all that inherited its pipe have closed it."""
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        rest = b""
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._hear(line)
        finally:
            if rest:
                self._hear(rest)
            transport.close()

    def _hear(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if text.strip():
            self._last_lines.append(text.strip())
        self._output(self.spec.name, text)

    async def _watch(self) -> None:
        """Sets `ready` as soon as the process is ready."""
        if self.spec.ready_url is None:
            await asyncio.sleep(self._policy.settled_s)
        while self.spec.ready_url is not None and not await _answers(self.spec.ready_url):
            await asyncio.sleep(self._policy.probe_s)
        self.state = ProcessState.READY
        self._was_ready = True
        self.ready.set()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


async def _answers(url: str) -> bool:
    try:
        return (await get(url, _PROBE_TIMEOUT_S)).status == 200
    except (UnavailableError, ConfigurationError):
        return False


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
