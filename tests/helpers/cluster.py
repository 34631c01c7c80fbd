"""A real cluster for tests: the services' own processes on loopback ports, each to be killed, stopped or restarted.

Leaving the context kills them all. When a test fails inside it, the ends of their logs are added to its error.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.errors import TandemError
from tandem.process.child import launch_command
from tandem.process.cores import Share
from tandem.process.ports import free_ports
from tandem.process.process_spec import ProcessSpec
from tandem.process.topology import LOOPBACK, Topology
from tandem.rpc.client import RouterClient
from tests.helpers import event_loop
from tests.helpers.fork_server import SERVER, ForkedProcess, is_forkable
from tests.helpers.secret import AS_GATEWAY, SECRET

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0
_POLL_S = 0.02
_SHOWN_LINES = 40
_KV_CACHE_GIB = "0.25"  # NOTE: memory is written once before it is used, which takes seconds for the default


class ClusterProcess:
    """One process of a cluster. Nobody restarts it but `restart`. `root`: where the code is that it is started with."""

    def __init__(self, spec: ProcessSpec, directory: Path, root: Path = ROOT) -> None:
        self.spec = spec
        self.name = spec.name
        self.root = root
        self._log_path = directory / f"{spec.name}.log"
        self._num_marked = 0
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives, negative for a signal."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.poll()

    @property
    def bound_address(self) -> str:
        """Address of its gRPC server."""
        return self.spec.argv[self.spec.argv.index("--bind") + 1]

    def is_running(self) -> bool:
        """Stopped counts."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; does not wait until it is ready."""
        assert not self.is_running(), f"{self.name} runs"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
        environment |= {"PYTHONPATH": str(self.root), "PYTHONUNBUFFERED": "1", **self.spec.env}
        if self.root != ROOT:
            environment["CXX"] = "false"  # NOTE: to compile another release's kernels takes a minute, in each worker
        with self._log_path.open("ab") as log:
            if self.root == ROOT and is_forkable(self.spec.argv, self.spec.env):
                module, *arguments = self.spec.argv[2:]
                self._process = SERVER.start(module, arguments, environment, self.spec.cpus, log.fileno())
                return
            # NOTE: the kernel ends a tied child with the thread that started it, so other threads start free ones
            is_main = threading.current_thread() is threading.main_thread()
            self._process = subprocess.Popen(
                launch_command(self.spec.argv, self.spec.cpus, tied=is_main),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
                env=environment,
                process_group=0,
            )

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        if self._process is not None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            self._process.wait()

    def terminate(self) -> None:
        """SIGTERM; does not wait for the end."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait for its end; returns the exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """SIGSTOP; returns when every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        if isinstance(self._process, ForkedProcess):
            self._process.wait_stopped()
        else:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start it again at the same address, killing it first if it lives; returns when it is ready."""
        self.kill()
        self.start()
        self.wait_ready()

    def is_ready(self) -> bool:
        assert self.spec.ready_url is not None
        try:
            return httpx.get(self.spec.ready_url, timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            assert self.returncode is None, f"{self.name} ended with {self.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline_s, f"{self.name} is not ready in {timeout_s:g} s:\n{self.tail()}"
            time.sleep(_POLL_S)

    def log(self) -> str:
        """Log of the process, over all its restarts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def mark_log(self) -> None:
        """Excludes the log so far from what failures show."""
        self._num_marked = len(self.log())

    def tail(self) -> str:
        return "\n".join(self.log()[self._num_marked :].splitlines()[-_SHOWN_LINES:])


class Cluster:
    """A running cluster. Made by `running_cluster`."""

    def __init__(self, topology: Topology, directory: Path, roots: Mapping[str, Path], address: str) -> None:
        self.topology = topology
        specs = [_listening_at(address, spec) for spec in topology.specs()]
        self.processes = {spec.name: ClusterProcess(spec, directory, roots.get(spec.name, ROOT)) for spec in specs}
        self._http = httpx.Client(trust_env=False, timeout=10.0)

    @property
    def url(self) -> str:
        """Of the first gateway."""
        return self.topology.gateway_url()

    @property
    def model(self) -> str:
        """The served name."""
        return self.topology.served_model_name

    def names(self, role: str) -> list[str]:
        """The processes of a role, in order."""
        return [name for name in self.processes if name == role or name.startswith(f"{role}-")]

    def start(self) -> None:
        """Start what does not run; returns when all are ready and every router knows all workers."""
        idle = [process for process in self.processes.values() if not process.is_running()]
        for process in idle:
            process.start()
        for process in idle:
            process.wait_ready()
        self.wait(self.is_whole, START_TIMEOUT_S)

    def close(self) -> None:
        """Kill them all."""
        self._http.close()
        for process in self.processes.values():
            process.kill()

    def get(self, path: str, gateway: int = 0) -> Any:
        """The JSON that a gateway answers to GET `path`."""
        answer = self._http.get(f"{self.topology.gateway_url(gateway)}{path}")
        answer.raise_for_status()
        return answer.json()

    def workers(self) -> list[dict[str, Any]]:
        """Rows of /admin/workers at the first gateway."""
        listed: list[dict[str, Any]] = self.get("/admin/workers")["workers"]
        return listed

    def is_whole(self) -> bool:
        """Whether every router gives requests to every worker that runs. Ready workers need up to a second for it."""
        workers = (self.processes[name] for role in ("prefill", "decode") for name in self.names(role))
        pids = {process.pid for process in workers if process.is_running()}
        routers = (self.processes[name].bound_address for name in self.names("router"))
        return all(event_loop.run(_living_pids(address)) == pids for address in routers)

    def metrics(self, name: str) -> dict[str, dict[tuple[str, ...], float]]:
        """A process's metrics by sample name and label values in the order of their names."""
        answer = self._http.get(f"{self.topology.metrics_url(name)}/metrics")
        answer.raise_for_status()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def blocks(self, name: str) -> dict[str, int]:
        """A worker's KV blocks by state."""
        return {state: int(count) for (state,), count in self.metrics(name)["tandem_kv_blocks"].items()}

    def wait(self, predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Ask until the answer is true; a gateway, router or worker that cannot be asked counts as false.

        The last look begins after `timeout_s`: this process, too, may not have run for a while.
        """
        deadline_s = time.monotonic() + timeout_s
        is_last = False
        while not _holds(predicate):
            assert not is_last, f"it does not hold after {timeout_s:g} s"
            time.sleep(_POLL_S)
            is_last = time.monotonic() >= deadline_s

    def logs(self) -> str:
        """The end of every process's log."""
        return "\n".join(f"--- {name}\n{process.tail()}" for name, process in self.processes.items())


@contextlib.contextmanager
def running_cluster(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    gateways: int = 1,
    redis: str | None = None,
    transport: str = "auto",
    block_size: int = 16,
    extra: Mapping[str, Sequence[str]] | None = None,
    env: Mapping[str, str] | None = None,
    seed: int | None = None,
    roots: Mapping[str, Path] | None = None,
    address: str = LOOPBACK,
) -> Iterator[Cluster]:
    """A ready cluster for the time of the block.

    Args:
        extra: more flags, by process name (`decode-0`), role (`decode`), or `worker` for every worker.
        env: more variables for every process.
        seed: of the choice of ports; None = another choice each time.
        roots: where the code of a process is, by its name; those left out run this tree's.
        address: at which all listen.
    """
    flags = dict(extra or {})
    workers = tuple(flags.pop("worker", ()))
    if "--kv-cache-gib" not in workers:
        workers += ("--kv-cache-gib", _KV_CACHE_GIB)
    ports = free_ports(2 * (routers + prefill + decode) + gateways, LOOPBACK, random.Random(seed))
    topology = Topology(
        model=str(model),
        served_model_name=model.name,
        num_prefill=prefill,
        num_decode=decode,
        num_routers=routers,
        host=address,
        gateway_ports=tuple(ports[:gateways]),
        ports=tuple(ports[gateways:]),
        cluster_secret=SECRET.decode(),
        shares=tuple(Share(1) for _ in range(prefill + decode)),
        redis=redis,
        transport=transport,
        worker_flags=("--block-size", str(block_size), *workers),
        flags=flags,
        env=env or {},
    )
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(topology, Path(directory), roots or {}, address)
        try:
            cluster.start()
            yield cluster
        except BaseException as error:
            error.add_note(cluster.logs())
            raise
        finally:
            cluster.close()


def _listening_at(address: str, spec: ProcessSpec) -> ProcessSpec:
    """The same process at another address than loopback's first."""
    moved = [argument.replace(LOOPBACK, address) for argument in spec.argv]
    return replace(spec, argv=tuple(moved), ready_url=(spec.ready_url or "").replace(LOOPBACK, address) or None)


async def _living_pids(router: str) -> set[int]:
    client = RouterClient(router, AS_GATEWAY)
    try:
        return {listing.status.pid for listing in await client.workers(timeout_s=1.0) if listing.is_alive}
    except TandemError:
        return set()
    finally:
        await client.close()


def _holds(predicate: Callable[[], object]) -> bool:
    try:
        return bool(predicate())
    except (httpx.HTTPError, TandemError, KeyError, json.JSONDecodeError):
        return False
