"""Settings of a router, from flags and `TANDEM_*`. Owns names, units and limits; decides nothing."""

from functools import cached_property
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from tandem.core.errors import ConfigurationError
from tandem.locality.base import DEFAULT_MAX_BLOCK_REPLICAS, MIN_BLOCK_REPLICAS
from tandem.process.peer_settings import PeerSettings
from tandem.process.settings import required_secret
from tandem.routing.admission import AdmissionLimits
from tandem.routing.policies import POLICIES


class RouterSettings(PeerSettings, cli_prog_name="python -m services.router"):
    """Pairs each request with a prefill and a decode worker. No token passes through it; any number may run."""

    bind: str = Field("127.0.0.1:7800", description="host:port to listen on; port 0 = any free one")
    redis: str | None = Field(
        None, description="redis:// URL at which workers register themselves and their blocks; omitted: at this router"
    )
    discovery: Literal["auto", "announce", "redis", "kubernetes"] = Field(
        "auto",
        description="discovery of workers: announce (they register at this router), redis (they register in Redis) or "
        "kubernetes (ready pods); auto: redis if there is a URL, else announce",
    )
    kubernetes_namespace: str | None = Field(
        None, description="namespace of the workers' pods; omitted: this pod's, or the kubeconfig's"
    )
    kubernetes_selector: str = Field(
        "app.kubernetes.io/name=tandem,tandem.dev/role",
        min_length=1,
        description="label selector of the workers' pods; each is called at its container port named grpc",
    )
    workers: str = Field("", description="workers that do not register, as host:port,host:port")
    policy: str = Field("predicted-cost", description=f"routing policy: {', '.join(POLICIES)}")
    max_ttft_s: float = Field(
        60.0, gt=0, description="requests are refused if their first token is predicted to take longer, seconds"
    )
    dead_after_s: float = Field(
        2.0,
        ge=0.5,
        le=60,
        description="a worker that has not reported for this long gets no requests, seconds; workers report every "
        "0.25 s",
    )
    outlier_factor: float = Field(
        4.0,
        gt=1,
        description="workers this many times as slow as their peers' median are set aside and probed later; inf: never",
    )
    max_local_tokens: int = Field(
        512,
        ge=0,
        description="a decode worker may compute a prompt itself if at most so many of its tokens are not cached",
    )
    max_block_replicas: int = Field(
        DEFAULT_MAX_BLOCK_REPLICAS,
        ge=MIN_BLOCK_REPLICAS,
        description="maximum size of the locality index: blocks, counted once for each worker that has them",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of /metrics and /health; 0 = any free one; omitted: none"
    )
    cluster_secret: SecretStr | None = Field(None, description="secret shared by all processes of a cluster; required")
    grace_s: float = Field(5.0, ge=0, description="time for running calls to finish after SIGTERM, seconds")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text, or json: one object a line")

    @field_validator("bind")
    @classmethod
    def _check_bind(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("write host:port")
        return value

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: str) -> str:
        for address in filter(None, value.split(",")):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address.strip()!r} is not host:port")
        return value

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"use one of {', '.join(POLICIES)}")
        return value

    @property
    def found_by(self) -> str:
        """The kind of discovery, with "auto" resolved."""
        if self.discovery == "auto":
            return "redis" if self.redis else "announce"
        if self.discovery == "redis" and not self.redis:
            raise ConfigurationError("discovery=redis needs the URL of a Redis; give --redis")
        if self.discovery == "announce" and self.redis:
            raise ConfigurationError(
                "discovery=announce finds no worker beside --redis, where they announce themselves; use redis or auto"
            )
        return self.discovery

    @property
    def host(self) -> str:
        """Host to listen at, also for metrics; without the brackets of an IPv6 address."""
        return self.bind.rpartition(":")[0].strip("[]")

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.workers.split(",") if address.strip())

    @cached_property
    def secret(self) -> bytes:
        """The cluster's secret; raises `ConfigurationError` if it is missing or too short."""
        return required_secret(self.cluster_secret, f"bind={self.bind!r}")

    def limits(self) -> AdmissionLimits:
        """Limits of admission."""
        return AdmissionLimits(
            fresh_s=min(self.dead_after_s, max(0.75, 0.375 * self.dead_after_s)),
            dead_s=self.dead_after_s,
            max_ttft_ms=1000 * self.max_ttft_s,
            max_local_tokens=self.max_local_tokens,
        )
