"""Tandem as containers of one bridge network: Redis, two routers, a gateway and workers, each with limits of its own.

Names are what DNS on the network answers to: `redis`, `router-0`, `prefill-1`, ... Leaving `running_fleet` removes all.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tools.images import CommandError, Container, ContainerSpec, Images, Network

ROOT = Path(__file__).parents[2]
MODEL = "tandem-demo"
MODEL_PATH = f"/models/{MODEL}"
NETWORK = "tandem-e2e"
SECRET = "end-to-end tests share this one"
READY_S = 120.0
PORTS = {
    "gateway": (8000, "/ready"),
    "router": (7801, "/health"),
    "prefill": (7901, "/health"),
    "decode": (7901, "/health"),
}
_POLL_S = 0.05
_SHARED = {"TANDEM_CLUSTER_SECRET": SECRET, "TANDEM_INSECURE": "true", "OMP_NUM_THREADS": "1"}
_WORKER = {
    "TANDEM_MODEL": MODEL_PATH,
    "TANDEM_REDIS": "redis://redis:6379/0",
    "TANDEM_NUM_THREADS": "1",
    "TANDEM_DTYPE": "float32",
    "TANDEM_KV_CACHE_GIB": "0.25",
    "TANDEM_CHECKSUM_SHARE": "1",
    "TANDEM_GRACE_S": "40",
}
_ENV: Mapping[str, Mapping[str, str]] = {
    "gateway": {
        "TANDEM_MODEL": MODEL_PATH,
        "TANDEM_ROUTERS": "router-0:7800,router-1:7800",
        "TANDEM_ALLOW_ANONYMOUS": "true",
        "TANDEM_ADMIN_BIND": "0.0.0.0:8001",
    },
    "router": {
        "TANDEM_REDIS": "redis://redis:6379/0",
        "TANDEM_METRICS_PORT": "7801",
        "TANDEM_MAX_LOCAL_TOKENS": "0",
        "HEALTH_URL": "http://127.0.0.1:7801/health",
    },
    "prefill": _WORKER,
    "decode": _WORKER,
}
_LIMITS = {"redis": (0.5, "256m"), "router": (0.5, "512m"), "gateway": (1.0, "1g")}
_WORKER_LIMITS = (1.0, "2g")


def role_of(name: str) -> str:
    return name.partition("-")[0]


def spec_of(name: str, images: Images) -> ContainerSpec:
    """Specification of the container of that name."""
    role = role_of(name)
    cpus, memory = _LIMITS.get(role, _WORKER_LIMITS)
    if role == "redis":
        return ContainerSpec(name, images.redis, NETWORK, cpus=cpus, memory=memory)
    env = {**_SHARED, **_ENV[role]}
    if role in ("prefill", "decode"):
        env["TANDEM_WORKER_ID"] = name
    return ContainerSpec(
        name,
        images.worker if role in ("prefill", "decode") else images.control,
        NETWORK,
        argv=(f"services.{role}",),
        env=env,
        mounts={} if role == "router" else {MODEL_PATH: f"{ROOT / 'demo' / MODEL}:ro"},
        tmpfs=("/var/cache/tandem",),
        cpus=cpus,
        memory=memory,
    )


class Fleet:
    """The containers by name. Nobody restarts them but us."""

    def __init__(self, images: Images, network: Network) -> None:
        self.images = images
        self.network = network
        self.containers: dict[str, Container] = {}

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://{self.containers['gateway'].ip()}:8000"

    @property
    def admin_url(self) -> str:
        """URL at which the gateway answers operators."""
        return f"http://{self.containers['gateway'].ip()}:8001"

    def start(self, name: str) -> Container:
        """Start a container anew; returns before it is ready."""
        self.containers[name] = Container.start(spec_of(name, self.images))
        return self.containers[name]

    def start_ready(self, *names: str) -> float:
        """Start some together and wait until all are ready; how long that took, seconds."""
        start_s = time.monotonic()
        for name in names:
            self.start(name)
        for name in names:
            self.wait_ready(name)
        return time.monotonic() - start_s

    def remove(self, name: str) -> None:
        self.containers.pop(name).remove()

    def wait_ready(self, name: str, timeout_s: float = READY_S) -> None:
        """Until it says so itself; Redis until it runs."""
        self.until(lambda: self._is_ready(name), timeout_s, f"{name} ready")

    def workers(self) -> dict[str, dict[str, Any]]:
        """Workers that the gateway lists, by id."""
        answer = httpx.get(f"{self.admin_url}/admin/workers", timeout=5.0, trust_env=False)
        answer.raise_for_status()
        return {worker["worker_id"]: worker for worker in answer.json()["workers"]}

    def timeline(self, request_id: str) -> str:
        """Timeline of a request at the gateway, as JSON."""
        return httpx.get(f"{self.url}/admin/requests/{request_id}", timeout=5.0, trust_env=False).text

    def alive(self, role: str) -> set[str]:
        """The workers of a role that take work, as the gateway knows."""
        found = self.workers().items()
        return {
            name
            for name, worker in found
            if role_of(name) == role and worker["is_alive"] and worker["state"] == "ready"
        }

    def until(self, predicate: Callable[[], object], timeout_s: float, what: str) -> float:
        """Ask until the answer is true; one that cannot be had counts as false. How long that took, seconds."""
        start_s = time.monotonic()
        while not _holds(predicate):
            assert time.monotonic() < start_s + timeout_s, f"not {what} after {timeout_s:g} s\n{self.logs()}"
            time.sleep(_POLL_S)
        return time.monotonic() - start_s

    def logs(self, tail: int = 15) -> str:
        """The end of what each container wrote."""
        return "\n".join(f"--- {name}\n{_words(container, tail)}" for name, container in self.containers.items())

    def _is_ready(self, name: str) -> bool:
        state = self.containers[name].state()
        assert state.is_running, f"{name} is {state.status} ({state.exit_code})\n{self.containers[name].logs(40)}"
        if role_of(name) == "redis":
            return self.containers[name].exec("redis-cli", "ping") == "PONG"
        port, path = PORTS[role_of(name)]
        return httpx.get(f"http://{state.ip}:{port}{path}", timeout=2.0, trust_env=False).status_code == 200


@contextlib.contextmanager
def running_fleet(images: Images) -> Iterator[Fleet]:
    """A ready fleet of two prefill and two decode workers for the time of the block."""
    with Network.running(NETWORK) as network:
        fleet = Fleet(images, network)
        try:
            fleet.start_ready("redis")
            fleet.start_ready("router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
            fleet.start_ready("gateway")
            fleet.until(lambda: len(fleet.alive("prefill") | fleet.alive("decode")) == 4, 30, "all four workers known")
            yield fleet
        except BaseException as error:
            error.add_note(fleet.logs())
            raise


def _holds(predicate: Callable[[], object]) -> bool:
    try:
        return bool(predicate())
    except (httpx.HTTPError, CommandError, KeyError):
        return False


def _words(container: Container, tail: int) -> str:
    try:
        return container.logs(tail)
    except CommandError as error:
        return str(error)
