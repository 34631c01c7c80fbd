"""Settings of a worker, from flags and `TANDEM_*` variables. Defines names, units and limits; decides nothing."""

import socket
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from tandem.architecture.tensors import MAX_RANKS
from tandem.compute.native.core_board import CoreBoard
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import OFF, serves_prompts
from tandem.models.hub import served_name
from tandem.process.peer_settings import PeerSettings
from tandem.process.settings import Address, EngineSettings, checked_address, required_secret
from tandem.routing.snapshot import Role

AUTO = "auto"
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def first_address(addresses: Iterable[str]) -> str | None:
    """The first address that other machines can call, IPv4 before IPv6; None if there is none.

    NOTE: a link-local address needs the interface's name, which differs between machines.
    """
    parsed = sorted((ip_address(address.partition("%")[0]) for address in addresses), key=lambda each: each.version)
    callable_ones = (each for each in parsed if not (each.is_loopback or each.is_link_local or each.is_unspecified))
    return next(map(str, callable_ones), None)


def _own_addresses() -> list[str]:
    interfaces = psutil.net_if_addrs().values()
    return [entry.address for entries in interfaces for entry in entries if entry.family in _IP_FAMILIES]


class WorkerSettings(EngineSettings, PeerSettings):
    """A prefill or decode worker: an engine, its KV blocks, and the transports that move them."""

    bind: str = Field("127.0.0.1:0", description="host:port for calls; port 0 = any free one; private networks only")
    advertise: str | None = Field(
        None,
        description="host:port at which others call this worker, if not --bind; auto: this machine's first address",
    )
    worker_id: str | None = Field(
        None, max_length=200, description="id of this worker, ideally the same after restarts; omitted: a new one"
    )
    routers: str = Field(
        "", description="routers at which this worker registers if there is no Redis, as host:port,host:port"
    )
    redis: str | None = Field(
        None, description="redis:// URL at which this worker registers itself and its blocks; omitted: at --routers"
    )
    served_model_name: str | None = Field(None, description="model name in requests; omitted: the directory's name")
    transport: str = Field("auto", description="transport of KV blocks: auto, cma, nixl, tcp or inproc")
    kv_port: int = Field(
        0, ge=0, le=65535, description="the tcp transport's port, at the host of --bind; 0 = any free one"
    )
    lease_ttl_s: float = Field(
        10.0, ge=1, le=600, description="time after which a lease that is not renewed expires, seconds"
    )
    checksum_share: float = Field(
        0.02, gt=0, le=1, description="share of the received blocks whose checksums are compared; 1 = all"
    )
    pin_share: float = Field(
        0.5, ge=0, le=1, description="maximum share of the KV blocks for pinned prefixes; 0 = none"
    )
    host_kv_gib: float = Field(
        0.0, ge=0, le=1e6, description="host memory for pinned prefixes moved out of the KV blocks, GiB; 0 = none"
    )
    tp: int = Field(
        1, ge=1, le=MAX_RANKS, description="processes that compute parts of every layer (tensor parallel): 1, 2, 4 or 8"
    )
    pp: int = Field(
        1, ge=1, le=MAX_RANKS, description="stages of layers, each of its own processes (pipeline parallel): 1 to 8"
    )
    cp: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="parts of a long prompt, each computed by its own processes (context parallel): 1 to 8; prefill "
        "workers only",
    )
    hosts: int = Field(
        1, ge=1, le=MAX_RANKS, description="hosts over which these are divided; the others run services.rank_host"
    )
    ranks_bind: Address | None = Field(
        None, description="host:port at which the other hosts join, required with --hosts; private networks only"
    )
    join_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="time for the other hosts to join, seconds; then this process ends"
    )
    core_board: str | None = Field(
        None,
        description="FILE:SLOT of the table by which workers of one machine share cores, set by `tandem up`; "
        "omitted: no sharing",
    )
    cluster_secret: SecretStr | None = Field(None, description="secret shared by all processes of a cluster; required")
    grace_s: float = Field(120.0, ge=0, description="time for running requests to finish after SIGTERM, seconds")
    max_step_s: float = Field(
        120.0,
        gt=0,
        description="maximum duration of one step, after which the engine counts as stuck and the process ends, "
        "seconds",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of /metrics and /health; 0 = any free one; omitted: none"
    )
    otlp_endpoint: str | None = Field(
        None, description="OpenTelemetry collector for traces, http://host:4318; omitted: none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text, or json: one object a line")

    @model_validator(mode="after")
    def _divides_ranks(self) -> Self:
        if self.pp == 1 and self.tp % self.hosts:
            raise ValueError(f"tp={self.tp} is not divided evenly by hosts={self.hosts}; give tp 2, 4 or 8")
        if self.pp > 1 and self.pp % self.hosts:
            raise ValueError(
                f"pp={self.pp} with hosts={self.hosts}: each host has whole stages of layers; give as many stages as "
                "hosts or a multiple, or fewer hosts"
            )
        if self.hosts > 1 and self.pp == 1 and self.cp > 1:
            raise ValueError(
                f"cp={self.cp} with hosts={self.hosts}: contexts of a stage share one memory; give cp=1, hosts=1, or "
                f"pp={self.hosts}"
            )
        if self.cp > 1 and self.role is not Role.PREFILL:
            raise ValueError(
                f"cp={self.cp} for a {self.role} worker: it divides prompts, and a decode step has one token of each "
                "request; give cp to prefill workers, and tp to this one"
            )
        if self.hosts > 1 and self.ranks_bind is None:
            raise ValueError(f"hosts={self.hosts} needs ranks_bind, where the others join, such as 10.0.0.1:7903")
        return self

    @field_validator("core_board")
    @classmethod
    def _has_slot(cls, value: str | None) -> str | None:
        if value is not None and not value.rpartition(":")[2].isdecimal():
            raise ValueError("needs the form FILE:SLOT, such as /tmp/cores:0")
        return value

    @field_validator("advertise")
    @classmethod
    def _resolve_auto(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if value != AUTO:
            if not checked_address(value).rpartition(":")[2].strip("0"):
                raise ValueError("port 0 cannot be called; write the port at which others reach this worker")
            return value
        port = str(info.data.get("bind", "")).rpartition(":")[2]
        if not port.strip("0"):
            raise ValueError("needs bind with a port other than 0, such as 0.0.0.0:7900")
        host = first_address(_own_addresses())
        if host is None:
            raise ValueError("this machine has no address but loopback ones; write host:port")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def engine_config(self) -> EngineConfig:
        config = replace(super().engine_config(), pin_share=self.pin_share)
        # NOTE: prompts are computed without drafts; a head is loaded for the state that it hands over
        has_no_use = self.role is Role.PREFILL and not serves_prompts(self.speculate)
        return replace(config, speculate=OFF) if has_no_use else config

    def open_core_board(self) -> CoreBoard | None:
        """Opens the core board (memory by which workers of a machine lend each other cores); None if not configured.
        Raises `ConfigurationError` if it cannot be opened.
        """
        if self.core_board is None:
            return None
        path, _, slot = self.core_board.rpartition(":")
        return CoreBoard(Path(path), int(slot))

    @property
    def num_ranks(self) -> int:
        """Number of processes of this worker that compute: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def host_kv_bytes(self) -> int:
        """Size of the host tier in bytes."""
        return int(self.host_kv_gib * 2**30)

    @property
    def role(self) -> Role:
        """Role of this worker for the router."""
        return Role.BOTH

    @property
    def host(self) -> str:
        """Host to listen at; without the brackets of an IPv6 address."""
        return self.bind.rpartition(":")[0].strip("[]")

    @property
    def ranks_address(self) -> tuple[str, int]:
        """Address at which other hosts join, for a worker on several hosts."""
        assert self.ranks_bind is not None
        host, _, port = self.ranks_bind.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        """host:port where other hosts join, if there are any."""
        return () if self.ranks_bind is None else (self.ranks_bind,)

    @property
    def router_addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.routers.split(",") if address.strip())

    @property
    def model_name(self) -> str:
        return self.served_model_name or served_name(self.model)

    @cached_property
    def secret(self) -> bytes:
        """The cluster's secret; raises `ConfigurationError` if it is missing or too short."""
        return required_secret(self.cluster_secret, f"bind={self.bind!r}")

    def advertised(self, bind: str) -> str:
        """host:port that others call, given the address listened at.

        Raises:
            ConfigurationError: bound to a wildcard address, which cannot be called.
        """
        if self.advertise is not None:
            return self.advertise
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigurationError(
                f"bind={self.bind!r} is no address to call; set advertise={socket.gethostname()}:PORT"
            )
        return bind


class PrefillSettings(WorkerSettings, cli_prog_name="python -m services.prefill"):
    """A prefill worker: computes prompts and leases their KV blocks to decode workers."""

    @property
    def role(self) -> Role:
        return Role.PREFILL


class DecodeSettings(WorkerSettings, cli_prog_name="python -m services.decode"):
    """A decode worker: fetches the KV of prompts and generates tokens. It computes a prompt itself where that is
    faster.
    """

    @property
    def role(self) -> Role:
        return Role.DECODE
