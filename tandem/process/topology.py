"""The processes of a cluster on one machine, and their flags. Starts nothing itself.

Only this module builds the command lines of the services, so that `tandem up` and tests start the same cluster.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.process.cores import Share
from tandem.process.gpus import GpuShare
from tandem.process.process_spec import ProcessSpec
from tandem.rpc.credentials import certified_role

LOOPBACK = "127.0.0.1"
ROUTER, PREFILL, DECODE, GATEWAY = "router", "prefill", "decode", "gateway"
_TIERS = {ROUTER: 0, PREFILL: 1, DECODE: 2, GATEWAY: 3}  # a higher one uses the lower ones, so it is stopped before


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster on one machine.

    Args:
        model: directory or hub id.
        served_model_name: model name in clients' requests.
        num_prefill: 0 = decode workers compute prompts themselves.
        host: where gateways listen; everything else listens on the loopback interface.
        gateway_ports: one for each gateway.
        admin_binds: for each gateway the host:port that serves operators; empty = its own port does.
        is_anonymous: gateways may listen beyond loopback without asking for keys.
        ports: two for each router and worker, in the order of `specs`.
        cluster_secret: passed to every process by its environment, since everybody on the machine may read command
            lines.
        redis: URL; None = routers keep the index and the list of workers.
        shares: each worker's share of the cores, prefill first.
        gpus: each worker's share of the GPUs, prefill first; empty = workers have none, or choose themselves.
        node: makes worker ids unique among machines that share a Redis; "" = not needed.
        tls_dir: has a directory of certificates for each role, named after it; None = calls are plain text.
        core_board: file by which workers lend each other cores; None = they do not.
        worker_flags: further flags of every worker.
        flags: further flags, by process name or role.
        env: variables for every process.
        without_env: variables of this process that no other process must see.
    """

    model: str
    served_model_name: str
    num_prefill: int
    num_decode: int
    num_routers: int
    host: str
    gateway_ports: tuple[int, ...]
    ports: tuple[int, ...]
    cluster_secret: str = field(repr=False)
    shares: tuple[Share, ...]
    admin_binds: tuple[str, ...] = ()
    is_anonymous: bool = False
    gpus: tuple[GpuShare, ...] = ()
    redis: str | None = None
    transport: str = "auto"
    node: str = ""
    tls_dir: Path | None = None
    core_board: str | None = None
    worker_flags: tuple[str, ...] = ()
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    without_env: frozenset[str] = frozenset()

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def specs(self) -> list[ProcessSpec]:
        """Descriptions of all processes: routers, prefill workers, decode workers, gateways."""
        return [*self._routers(), *self._workers(), *self._gateways()]

    def metrics_url(self, name: str) -> str:
        """Base address of a process's metrics server."""
        names = [spec.name for spec in self.specs()]
        index = names.index(name)
        first_gateway = self.num_routers + self.num_workers
        if index >= first_gateway:
            return self.admin_url(index - first_gateway)
        return f"http://{LOOPBACK}:{self.ports[2 * index + 1]}"

    def gateway_url(self, index: int = 0) -> str:
        """Address of a gateway for clients on this machine."""
        return f"http://{_reached_at(self.host)}:{self.gateway_ports[index]}"

    def admin_url(self, index: int = 0) -> str:
        """Address of a gateway for operators on this machine."""
        if not self.admin_binds:
            return self.gateway_url(index)
        host, _, port = self.admin_binds[index].rpartition(":")
        return f"http://{_reached_at(host.strip('[]'))}:{port}"

    def _routers(self) -> Iterator[ProcessSpec]:
        for i in range(self.num_routers):
            flags = ("--bind", self._bind(i), "--metrics-port", str(self.ports[2 * i + 1]))
            yield self._internal(ROUTER, f"{ROUTER}-{i}", i, flags, Share(1))

    def _workers(self) -> Iterator[ProcessSpec]:
        roles = [PREFILL] * self.num_prefill + [DECODE] * self.num_decode
        for i, (role, share) in enumerate(zip(roles, self.shares, strict=True)):
            name = f"{role}-{i if role == PREFILL else i - self.num_prefill}"
            yield self._internal(role, name, self.num_routers + i, self._flags_of(name, i, share), share)

    def _flags_of(self, name: str, index: int, share: Share) -> tuple[str, ...]:
        place = self.num_routers + index
        return (
            *("--model", self.model, "--served-model-name", self.served_model_name),
            *("--bind", self._bind(place), "--metrics-port", str(self.ports[2 * place + 1])),
            *("--worker-id", f"{name}.{self.node}" if self.node else name, "--transport", self.transport),
            *(("--routers", self._router_list()) if self.redis is None else ()),
            *("--num-threads", str(share.num_threads)),
            *(("--core-board", f"{self.core_board}:{index}") if self.core_board else ()),
            *(self._gpu_flags(self.gpus[index]) if self.gpus else ()),
            *self.worker_flags,
        )

    def _gpu_flags(self, gpu: GpuShare) -> tuple[str, ...]:
        return ("--device", gpu.device, "--gpu-memory-utilization", f"{gpu.memory:g}")

    def _gateways(self) -> Iterator[ProcessSpec]:
        for i, port in enumerate(self.gateway_ports):
            name = GATEWAY if len(self.gateway_ports) == 1 else f"{GATEWAY}-{i}"
            flags = (
                *("--host", self.host, "--port", str(port), "--routers", self._router_list()),
                *("--model", self.model, "--served-model-name", self.served_model_name),
                *(("--admin-bind", self.admin_binds[i]) if self.admin_binds else ()),
                *(("--allow-anonymous",) if self.is_anonymous else ()),
            )
            yield self._spec(GATEWAY, name, flags, f"{self.gateway_url(i)}/ready", Share(1))

    def _internal(self, role: str, name: str, place: int, flags: tuple[str, ...], share: Share) -> ProcessSpec:
        return self._spec(role, name, flags, f"http://{LOOPBACK}:{self.ports[2 * place + 1]}/health", share)

    def _spec(self, role: str, name: str, flags: tuple[str, ...], ready_url: str, share: Share) -> ProcessSpec:
        more = [*self.flags.get(role, ()), *(self.flags.get(name, ()) if name != role else ())]
        threads = {"OMP_NUM_THREADS": str(share.num_threads), "OPENBLAS_NUM_THREADS": "1"}
        quiet = {"GRPC_VERBOSITY": "NONE"}  # NOTE: its library prints a line for every connection that ends
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", f"services.{role}", *flags, *more),
            env={**threads, **quiet, **self._secret_env(), **self._tls_env(role), **self.env},
            without_env=self.without_env,
            ready_url=ready_url,
            tier=_TIERS[role],
            cpus=share.cpus,
        )

    def _bind(self, place: int) -> str:
        return f"{LOOPBACK}:{self.ports[2 * place]}"

    def _router_list(self) -> str:
        return ",".join(self._bind(i) for i in range(self.num_routers))

    def _secret_env(self) -> Mapping[str, str]:
        """Variables for values that must not be flags, since every user of the machine can read command lines."""
        redis = {} if self.redis is None else {"TANDEM_REDIS": self.redis}
        return {"TANDEM_CLUSTER_SECRET": self.cluster_secret, **redis}

    def _tls_env(self, role: str) -> Mapping[str, str]:
        return {} if self.tls_dir is None else {"TANDEM_TLS_DIR": str(self.tls_dir / certified_role(role))}


def _reached_at(host: str) -> str:
    """Host by which a client on this machine reaches a process that listens at `host`."""
    if host in ("", "0.0.0.0"):
        return LOOPBACK
    return "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
