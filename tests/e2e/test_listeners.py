"""Listeners of all processes: the ports that were asked for, and nothing else that others can reach."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.process.ports import free_ports
from tandem.transport.nixl.bindings import unavailable_reason
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.cluster import running_cluster
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.planner_process import PlannerProcess
from tests.helpers.rank_hosts import rank_host
from tests.helpers.stranger import bound_names, listening
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

ROOT = Path(__file__).parents[2]
FLAGS = ("--port", "0", "--quiet", "--kv-cache-gib", "0.02", "--num-threads", "1", "--no-native-kernels")
LOOPBACK, OTHER = "127.0.0.1", "127.0.0.2"
END_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@contextmanager
def running(model: Path, logs: Path, transport: str) -> Iterator[tuple[str, list[psutil.Process]]]:
    """(URL, all processes), when it is ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "UCX_"))}
    flags = ("--model", model, "--log-dir", logs, "--transport", transport, *FLAGS)
    up = subprocess.Popen(
        [sys.executable, "-m", "tandem.cli.main", "up", *map(str, flags)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    with up.stdout:
        try:
            found = next(filter(None, (re.search(r"is served at (http://\S+)", line) for line in up.stdout)), None)
            assert found, "".join(log.read_text() for log in logs.iterdir())
            me = psutil.Process(up.pid)
            yield found[1], [me, *me.children(recursive=True)]
        finally:
            up.terminate()
            up.wait(END_S)


def _links(url: str) -> list[str]:
    """By which transport the workers read each other, once both have measured it."""
    limit_s = time.monotonic() + END_S
    while True:
        answer = httpx.get(f"{url}/admin/workers", timeout=10, trust_env=False).raise_for_status()
        found = [link["transport"] for worker in answer.json()["workers"] for link in worker.get("links", ())]
        if len(found) == 2:
            return found
        assert time.monotonic() < limit_s, found


@pytest.mark.parametrize(
    "transport", ["auto", "nixl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cma", "tcp"))]
)
def test_nothing_listens_outside_the_bind_address(model: Path, tmp_path: Path, transport: str) -> None:
    """NIXL's UCX listened on a random port of every interface, also with everything else bound to loopback."""
    if transport == "nixl" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    with running(model, tmp_path / "logs", transport) as (url, processes):
        assert set(_links(url)) == {"cma" if transport == "auto" else transport}
        ports = {process.pid: listening(process) for process in processes}
        names = [name for process in processes for name in bound_names(process)]
    assert {host for of_one in ports.values() for host, _ in of_one} == {LOOPBACK}
    num_own = 1 if transport in ("auto", "tcp") else 0
    # NOTE: of `tandem up` itself, the gateway, the router and both workers, gRPC and metrics counted
    assert sorted(map(len, ports.values())) == sorted([0, 1, 2, 2 + num_own, 2 + num_own]), ports
    assert all(name.startswith("@") for name in names)
    assert len(names) == (2 if transport == "nixl" else 0), "UCX's wake-up socket, one a worker"


@pytest.mark.parametrize(
    "transport", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nixl", "cma", "tcp"))]
)
def test_no_process_listens_outside_an_address_that_is_not_the_default(
    model: Path, tmp_path: Path, transport: str
) -> None:
    """Every service; the decode worker has a second host, which is told where it may listen by flags of its own."""
    if transport == "nixl" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    load_or_skip()
    (port,) = free_ports(1, OTHER, random.Random())
    ranks = ("--tp", "2", "--hosts", "2", "--ranks-bind", f"{OTHER}:{port}")
    workers = ("--kv-cache-gib", "0.02", "--num-threads", "1")
    host_flags = ("--kv-bind", f"{OTHER}:0", "--host", OTHER, "--metrics-port", "0")
    with (
        rank_host(port, *host_flags, leader=OTHER) as host,
        running_cluster(
            model, transport=transport, extra={"worker": workers, "decode": ranks}, address=OTHER
        ) as cluster,
        closing(PlannerProcess(cluster, tmp_path, host=OTHER)) as planner,
    ):
        planner.wait(lambda page: page["observation"])
        started = {name: psutil.Process(process.pid) for name, process in cluster.processes.items()}
        started |= {"rank host": host, "planner": psutil.Process(planner.process.pid)}
        ports = {
            name: [place for each in (process, *process.children(recursive=True)) for place in listening(each)]
            for name, process in started.items()
        }
    assert all(ports.values()), ports
    assert {address for places in ports.values() for address, _ in places} == {OTHER}, ports
