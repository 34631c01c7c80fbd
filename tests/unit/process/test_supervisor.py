"""Real processes: shell scripts and one HTTP server of a few lines."""

import asyncio
import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tandem.core.errors import ConfigurationError, UnavailableError
from tandem.process.ports import free_ports
from tandem.process.probe import get
from tandem.process.process_spec import ProcessSpec, RestartPolicy
from tandem.process.supervised import ProcessState
from tandem.process.supervisor import Supervisor

ROOT = Path(__file__).parents[3]
QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, settled_s=1.0, grace_s=10.0, probe_s=0.01)
WAIT_FOR_EVER = "while :; do sleep 0.05; done"
READY_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture
def unused_port() -> int:
    return free_ports(1, "127.0.0.1", random.Random())[0]


def shell(name: str, script: str, **options: object) -> ProcessSpec:
    return ProcessSpec(name=name, argv=("/bin/sh", "-c", script), **options)  # type: ignore[arg-type]


class Observed:
    """A supervisor and everything it says."""

    def __init__(self, specs: list[ProcessSpec], policy: RestartPolicy = QUICK) -> None:
        self.lines: list[tuple[str, str]] = []
        self.reports: list[str] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(specs, self._hear, self._take, policy)
        self.by_name = {process.spec.name: process for process in self.supervisor.processes}

    def _hear(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    def _take(self, report: str) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.02)


def supervise(
    specs: list[ProcessSpec],
    act: Callable[[Observed], Awaitable[None]] | None = None,
    policy: RestartPolicy = QUICK,
) -> tuple[int, Observed]:
    """Run a supervisor beside `act`, then tell it to stop; no `act`: it ends by itself. Returns its exit code."""

    async def main() -> tuple[int, Observed]:
        observed = Observed(specs, policy)
        running = asyncio.create_task(observed.supervisor.run())
        if act is not None:
            await act(observed)
            observed.supervisor.stop()
        return await running, observed

    return asyncio.run(asyncio.wait_for(main(), 30))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while is_alive(pid):
            await asyncio.sleep(0.01)


def test_output_is_passed_on_line_by_line_with_its_name() -> None:
    script = f"echo one; echo two >&2; printf 'b\\377d\\n'; {WAIT_FOR_EVER}"

    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.lines) == 3)

    code, observed = supervise([shell("a", script)], act)
    assert code == 0
    assert observed.lines == [("a", "one"), ("a", "two"), ("a", "b\ufffdd")]


def test_last_words_without_a_line_feed_are_heard() -> None:
    code, observed = supervise([shell("a", "printf goodbye; exit 2")])
    assert code == 2
    assert observed.lines == [("a", "goodbye")]


def test_a_flood_in_one_line_is_passed_on_whole_and_in_pieces() -> None:
    script = f"head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end; {WAIT_FOR_EVER}"

    async def act(observed: Observed) -> None:
        await observed.until(lambda: ("a", "end") in observed.lines)

    _, observed = supervise([shell("a", script)], act)
    assert sum(len(line) for _, line in observed.lines) == 1_000_003
    assert max(len(line) for _, line in observed.lines) <= 1 << 18


def test_ready_is_when_the_url_answers_200(unused_port: int) -> None:
    base = f"http://127.0.0.1:{unused_port}"
    argv = (sys.executable, "-c", READY_SERVER, str(unused_port))
    specs = [ProcessSpec(name="good", argv=argv, ready_url=f"{base}/health")]

    async def act(observed: Observed) -> None:
        assert not observed.by_name["good"].ready.is_set()
        await observed.supervisor.wait_ready()
        assert ("good", "listening") in observed.lines
        assert observed.by_name["good"].state is ProcessState.READY
        assert (await get(f"{base}/other", 5.0)).status == 503

    assert supervise(specs, act)[0] == 0


def test_a_url_that_does_not_say_200_is_not_ready(unused_port: int) -> None:
    argv = (sys.executable, "-c", READY_SERVER, str(unused_port))
    specs = [ProcessSpec(name="a", argv=argv, ready_url=f"http://127.0.0.1:{unused_port}/other")]

    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(observed.supervisor.wait_ready(), 0.3)

    supervise(specs, act)


def test_one_that_dies_is_started_again_and_the_others_live_on() -> None:
    specs = [shell("a", f"echo up; {WAIT_FOR_EVER}"), shell("b", f"echo up; {WAIT_FOR_EVER}")]

    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.lines) == 2)
        first, other = observed.by_name["a"].pid, observed.by_name["b"].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await observed.until(lambda: len(observed.lines) == 3)
        assert observed.by_name["a"].pid != first
        assert observed.by_name["b"].pid == other

    code, observed = supervise(specs, act)
    assert code == 0
    assert observed.reports == ["a died (SIGKILL); starting it again in 0.0 s"]


def test_delays_double_up_to_their_limit() -> None:
    policy = RestartPolicy()
    assert [policy.delay_s(i) for i in (1, 2, 3, 5, 6, 10_000)] == [0.2, 0.4, 0.8, 3.2, 5.0, 5.0]


def test_a_long_life_starts_over_with_the_first_delay() -> None:
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=1.0, settled_s=1.0, max_failed_starts=100)
    specs = [shell("a", f"echo up; {WAIT_FOR_EVER}")]

    async def die(observed: Observed, at_once: bool) -> None:
        process = observed.by_name["a"]
        started = len(observed.lines)
        await observed.until(lambda: len(observed.lines) > started or process.pid is not None)
        if not at_once:
            await process.ready.wait()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        num_reports = len(observed.reports)
        await observed.until(lambda: len(observed.reports) > num_reports)

    async def act(observed: Observed) -> None:
        for at_once in (True, True, True, True, False):
            await die(observed, at_once)

    _, observed = supervise(specs, act, policy)
    assert [report[-5:] for report in observed.reports] == ["0.0 s", "0.0 s", "0.0 s", "0.1 s", "0.0 s"]


def test_a_refused_configuration_stops_everything_with_its_message() -> None:
    other = shell("b", WAIT_FOR_EVER)
    code, observed = supervise([other, shell("a", "echo 'error: --port=x is no port' >&2; exit 2")])
    assert code == 2
    assert observed.reports[-1] == "error: a cannot start: error: --port=x is no port"
    assert observed.by_name["b"].pid is None
    assert observed.by_name["b"].state is ProcessState.ENDED


def test_exit_code_2_of_one_that_was_ready_is_a_death_like_any_other(tmp_path: Path) -> None:
    """A port that is still taken when a process is started again passes by itself."""
    script = f"if [ -e {tmp_path}/lived ]; then exit 2; fi; touch {tmp_path}/lived; sleep 1.2; exit 1"

    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.reports) >= 3)

    code, observed = supervise([shell("a", script)], act)
    assert code == 0
    assert observed.reports[0].startswith("a died (exit code 1)")
    assert observed.reports[1].startswith("a died (exit code 2)")


def test_one_that_never_gets_ready_is_given_up() -> None:
    code, observed = supervise([shell("a", "echo no memory; exit 3")])
    assert code == 1
    assert observed.reports[-1] == "error: a died 5 times before it was ready: no memory"
    assert observed.by_name["a"].num_starts == 5


def test_a_program_that_does_not_exist_is_said_so() -> None:
    code, observed = supervise([ProcessSpec(name="a", argv=("no-such-program",))])
    assert code == 2
    assert "no-such-program cannot be run" in observed.reports[-1]


def test_tiers_end_one_after_the_other(tmp_path: Path) -> None:
    log = tmp_path / "ends"

    def spec(name: str, tier: int, delay_s: float) -> ProcessSpec:
        trap = f"trap 'sleep {delay_s}; echo {name} >> {log}; exit 0' TERM; echo up; {WAIT_FOR_EVER}"
        return shell(name, trap, tier=tier)

    specs = [spec("router", 0, 0), spec("prefill", 1, 0.1), spec("decode", 2, 0.15), spec("gateway", 3, 0.2)]

    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.lines) == 4)

    assert supervise(specs, act)[0] == 0
    assert log.read_text().split() == ["gateway", "decode", "prefill", "router"]


@pytest.mark.parametrize(("code", "reports"), [(0, []), (3, ["router died (exit code 3)"])])
def test_one_that_ends_while_others_are_stopped_is_not_started_again(code: int, reports: list[str]) -> None:
    """Regression: a router that had been interrupted with all others was started again, to be stopped at once."""

    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.lines) == 2)
        observed.supervisor.stop()
        await observed.until(lambda: ("gateway", "ends") in observed.lines)
        router = observed.by_name["router"]
        assert router.pid is not None
        os.kill(router.pid, signal.SIGUSR1)
        await router.ended.wait()
        assert observed.by_name["gateway"].pid is not None
        os.kill(observed.by_name["gateway"].pid, signal.SIGUSR1)

    trapped = f"trap 'exit {code}' USR1; trap 'echo ends' TERM; echo up; {WAIT_FOR_EVER}"
    told = f"trap 'exit 0' USR1; trap 'echo ends' TERM; echo up; {WAIT_FOR_EVER}"
    ended, observed = supervise([shell("router", trapped), shell("gateway", told, tier=1)], act)
    assert ended == 0
    assert observed.by_name["router"].num_starts == 1
    assert observed.reports == reports


def test_a_child_that_is_interrupted_while_it_starts_lives_until_it_is_stopped() -> None:
    """Regression: processes that imported when all were interrupted printed tracebacks."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('lives', flush=True); signal.pause()"

    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))

    code, observed = supervise([ProcessSpec(name="a", argv=(sys.executable, "-c", program))], act)
    assert code == 0
    assert observed.lines == [("a", "lives")]
    assert observed.reports == []


def test_one_that_does_not_end_in_time_is_killed() -> None:
    policy = RestartPolicy(grace_s=0.2)
    pids: list[int | None] = []

    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))
        pids.append(observed.by_name["a"].pid)

    code, observed = supervise([shell("a", f"trap '' TERM; echo up; {WAIT_FOR_EVER}")], act, policy)
    assert code == 1
    assert observed.reports == ["a did not end within 0.2 s: killed"]
    assert pids[0] is not None
    assert not is_alive(pids[0])


def test_one_that_is_stopped_is_killed_too() -> None:
    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))
        pid = observed.by_name["a"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    assert supervise([shell("a", f"echo up; {WAIT_FOR_EVER}")], act, RestartPolicy(grace_s=0.2))[0] == 1


def test_one_that_waits_to_be_started_again_can_be_stopped() -> None:
    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.reports))

    code, observed = supervise([shell("a", "exit 1")], act, RestartPolicy(first_delay_s=1000.0, max_delay_s=1000.0))
    assert code == 0
    assert observed.by_name["a"].num_starts == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    async def main() -> int:
        observed = Observed([shell("a", f"echo up; {WAIT_FOR_EVER}")])
        running = asyncio.create_task(observed.supervisor.run())
        await observed.until(lambda: bool(observed.lines))
        os.kill(os.getpid(), number)
        return await running

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 0


def test_a_second_interrupt_kills_at_once() -> None:
    async def main() -> int:
        observed = Observed([shell(name, f"trap '' TERM; echo up; {WAIT_FOR_EVER}") for name in "ab"])
        running = asyncio.create_task(observed.supervisor.run())
        await observed.until(lambda: len(observed.lines) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        await observed.until(lambda: bool(observed.reports))
        os.kill(os.getpid(), signal.SIGINT)
        return await running

    assert asyncio.run(asyncio.wait_for(main(), 5)) == 130


def test_what_a_process_has_started_goes_with_it() -> None:
    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))
        grandchild = int(observed.lines[0][1])
        assert is_alive(grandchild)
        assert observed.by_name["a"].pid is not None
        os.kill(observed.by_name["a"].pid, signal.SIGKILL)
        await gone(grandchild)

    supervise([shell("a", f"sleep 1000 & echo $!; {WAIT_FOR_EVER}")], act)


def test_a_cancelled_supervisor_leaves_nothing() -> None:
    async def main() -> int:
        observed = Observed([shell("a", f"echo up; {WAIT_FOR_EVER}")])
        running = asyncio.create_task(observed.supervisor.run())
        await observed.until(lambda: bool(observed.lines))
        pid = observed.by_name["a"].pid
        assert pid is not None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return pid

    assert not is_alive(asyncio.run(asyncio.wait_for(main(), 30)))


def test_many_lives_leave_no_file_descriptor_open() -> None:
    gc.collect()  # NOTE: what earlier tests left to the collector may be open
    before = len(os.listdir("/proc/self/fd"))
    policy = RestartPolicy(first_delay_s=0.001, max_delay_s=0.001, max_failed_starts=20)
    assert supervise([shell("a", "exit 1")], policy=policy)[0] == 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(shutil.which("setsid") is None, reason="setsid (util-linux) is not on PATH")
def test_a_pipe_that_a_runaway_holds_open_is_closed_here() -> None:
    async def act(observed: Observed) -> None:
        await observed.until(lambda: len(observed.lines) == 2)
        pid = observed.by_name["a"].pid
        assert pid is not None
        before = len(os.listdir("/proc/self/fd"))
        os.kill(pid, signal.SIGKILL)
        await observed.until(lambda: len(observed.lines) == 4)
        after = len(os.listdir("/proc/self/fd"))
        for _, runaway in observed.lines[0], observed.lines[2]:
            os.kill(int(runaway), signal.SIGKILL)  # fails where it was not alive any more
        assert after == before

    script = f"setsid sleep 60 & echo $!; sleep 0.1; echo up; {WAIT_FOR_EVER}"
    assert supervise([shell("a", script)], act)[0] == 0


def test_variables_are_added_and_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PORT", "1")
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    script = f"echo $TANDEM_PORT-$TANDEM_LOG_LEVEL-$TANDEM_NEW; {WAIT_FOR_EVER}"
    spec = shell("a", script, env={"TANDEM_NEW": "x"}, without_env=frozenset({"TANDEM_PORT"}))

    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))

    assert supervise([spec], act)[1].lines == [("a", "-debug-x")]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot confine processes to cores")
def test_a_process_is_confined_to_its_cores() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = "import os, time; print(os.sched_getaffinity(0), flush=True); time.sleep(100)"
    spec = ProcessSpec(name="a", argv=(sys.executable, "-c", script), cpus=(cpu,))

    async def act(observed: Observed) -> None:
        await observed.until(lambda: bool(observed.lines))

    assert supervise([spec], act)[1].lines == [("a", str({cpu}))]


ORPHANAGE = """
import asyncio
from tandem.process.process_spec import ProcessSpec
from tandem.process.supervisor import Supervisor

async def main():
    spec = ProcessSpec(name="a", argv=("/bin/sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done"))
    await Supervisor([spec], lambda name, line: print(line, flush=True), print).run()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can end a process with its parent (PR_SET_PDEATHSIG)")
def test_a_killed_supervisor_leaves_no_orphans() -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", ORPHANAGE], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    with supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert is_alive(child)
        supervisor.kill()
    asyncio.run(gone(child))


def test_probing_nobody_or_nonsense_says_what_is_wrong(unused_port: int) -> None:
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{unused_port}"):
        asyncio.run(get(f"http://127.0.0.1:{unused_port}/health", 1.0))
    for url in ("ftp://x", "x", "http://", "http://h:99999", "http://[", "http://h/a b", "http://h/\r\nX: 1"):
        with pytest.raises(ConfigurationError, match="no HTTP address"):
            asyncio.run(get(url, 1.0))


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1\r\n\r\n"])
def test_what_does_not_answer_in_http_is_unavailable(said: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UnavailableError):
                await get(f"http://127.0.0.1:{port}/", 5.0)

    asyncio.run(main())
