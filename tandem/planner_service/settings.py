"""Settings of the planner, from flags and `TANDEM_*`. Owns names, units and limits; decides nothing."""

from functools import cached_property
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from tandem.core.addresses import check_host
from tandem.core.errors import ConfigurationError
from tandem.process.peer_settings import PeerSettings
from tandem.process.settings import required_secret


class PlannerSettings(PeerSettings, cli_prog_name="python -m services.planner"):
    """Observes prefill and decode workers, and recommends the number of replicas of each pool, or sets it."""

    mode: Literal["advise", "act"] = Field(
        "advise", description="advise: only recommend; act: set the replicas of both Deployments"
    )
    interval_s: float = Field(10.0, ge=0.2, le=600, description="time between decisions, seconds")

    ttft_ms: float = Field(1000.0, gt=0, description="objective of the time to the first token, milliseconds")
    tpot_ms: float = Field(50.0, gt=0, description="objective of the time per output token, milliseconds")
    slo_share: float = Field(
        0.95, ge=0.5, lt=1, description="share of the requests that must meet the objectives: 0.95 = p95"
    )
    min_prefill: int = Field(1, ge=1, description="minimum prefill replicas")
    max_prefill: int = Field(8, ge=1, description="maximum prefill replicas")
    min_decode: int = Field(1, ge=1, description="minimum decode replicas")
    max_decode: int = Field(8, ge=1, description="maximum decode replicas")
    prefill_accelerators: int = Field(1, ge=1, description="accelerators of one prefill replica")
    decode_accelerators: int = Field(1, ge=1, description="accelerators of one decode replica")
    max_accelerators: int | None = Field(
        None, ge=2, description="maximum accelerators of both pools together; omitted: no limit"
    )
    max_step_up: int = Field(16, ge=1, description="maximum replicas that one decision adds to a pool")
    max_step_down: int = Field(2, ge=1, description="maximum replicas that one decision removes from a pool")
    hold_s: float = Field(
        180.0, ge=0, description="a pool shrinks after fewer replicas have been enough for this long, seconds"
    )
    yield_s: float = Field(
        300.0,
        ge=0,
        description="a pool scaled by another autoscaler is left alone for this long, doubled each time; seconds",
    )
    startup_s: float = Field(
        60.0, ge=0, le=3600, description="start-up time of a replica until it has been measured, seconds"
    )
    warmup_s: float = Field(
        10.0, ge=0, le=600, description="measurements of a worker's first so many seconds are ignored"
    )
    max_num_running: int = Field(
        256, ge=1, description="maximum requests that one decode worker runs at once, as in its own settings"
    )

    model: str | None = Field(
        None,
        description="model for estimating speeds until they are measured, as in `tandem plan`; omitted: no estimates",
    )
    prefill_hardware: str | None = Field(
        None, description="accelerator of prefill workers, as in `tandem plan`; omitted: no estimates"
    )
    decode_hardware: str | None = Field(
        None, description="accelerator of decode workers, as in `tandem plan`; omitted: no estimates"
    )
    served_model_name: str | None = Field(None, description="count only workers of this model; omitted: all")

    routers: str = Field("127.0.0.1:7800", description="routers that know the workers, as host:port,host:port")
    gateways: str = Field(
        "",
        description="gateways' --admin-bind, as host:port,host:port; every address of a name is scraped (headless "
        "Service)",
    )
    gateway_selector: str | None = Field(
        None,
        description="label selector of the gateways' pods, whose port named metrics is scraped too; omitted: none",
    )

    kubernetes_namespace: str | None = Field(
        None, description="namespace of pods and Deployments; omitted: that of this pod or of KUBECONFIG"
    )
    prefill_deployment: str | None = Field(None, description="Deployment of the prefill workers; omitted: advise only")
    decode_deployment: str | None = Field(None, description="Deployment of the decode workers; omitted: advise only")
    prefill_selector: str | None = Field(
        None, description="label selector of the prefill workers' pods; omitted: starting replicas are not observed"
    )
    decode_selector: str | None = Field(
        None, description="label selector of the decode workers' pods; omitted: starting replicas are not observed"
    )
    lease_name: str = Field("tandem-planner", description="Lease by which one of several planners is elected to act")
    lease_s: float = Field(15.0, ge=3, le=600, description="time after which a silent planner is replaced, seconds")
    planner_id: str | None = Field(
        None, description="this planner's name in the Lease; omitted: host name and a random part"
    )

    host: str = Field("127.0.0.1", description="address of /metrics, /health and /plan")
    metrics_port: int | None = Field(
        7951, ge=0, le=65535, description="HTTP port of /metrics, /health and /plan; 0 = any free one; none = no server"
    )
    cluster_secret: SecretStr | None = Field(None, description="secret shared by all processes of a cluster; required")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text, or json: one object a line")

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _read_none(cls, value: object) -> object:
        return None if value == "none" else value

    @field_validator("routers", "gateways")
    @classmethod
    def _check_addresses(cls, value: str) -> str:
        for address in filter(None, (part.strip() for part in value.split(","))):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in address:
                raise ValueError(f"{address!r} is not host:port")
            check_host(host)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "PlannerSettings":
        """NOTE: does not raise `ValueError`, whose message would be attributed to a single flag."""
        problem = self._bounds_problem() or self._reach_problem()
        if problem is not None:
            raise ConfigurationError(problem)
        return self

    def _bounds_problem(self) -> str | None:
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            if least > most:
                return f"min_{pool}={least} is above max_{pool}={most}; lower one or raise the other"
        fewest = self.min_prefill * self.prefill_accelerators + self.min_decode * self.decode_accelerators
        if self.max_accelerators is not None and fewest > self.max_accelerators:
            return f"max_accelerators={self.max_accelerators} is too few: min_prefill and min_decode need {fewest}"
        return None

    def _reach_problem(self) -> str | None:
        if not self.router_addresses:
            return "routers is empty; name one host:port or more"
        if not self.gateway_addresses and not self.gateway_selector:
            return "no gateway is named; give gateways=host:port or gateway_selector"
        if (self.prefill_deployment is None) != (self.decode_deployment is None):
            return "one Deployment is named; give both prefill_deployment and decode_deployment, or neither"
        if self.mode == "act" and self.prefill_deployment is None:
            return "mode='act' needs prefill_deployment and decode_deployment; or use mode=advise"
        if (self.model is None) != (self.prefill_hardware is None and self.decode_hardware is None):
            return "guessing speeds needs model, and prefill_hardware or decode_hardware or both; or none of them"
        return None

    @property
    def router_addresses(self) -> tuple[str, ...]:
        return _split(self.routers)

    @property
    def gateway_addresses(self) -> tuple[str, ...]:
        return _split(self.gateways)

    @property
    def needs_kubernetes(self) -> bool:
        """Whether the planner uses a Kubernetes API."""
        return self.prefill_deployment is not None or bool(self.gateway_selector)

    @cached_property
    def secret(self) -> bytes:
        """The cluster's secret; raises as `required_secret`."""
        return required_secret(self.cluster_secret, f"routers={self.routers!r}")


def _split(addresses: str) -> tuple[str, ...]:
    return tuple(address.strip() for address in addresses.split(",") if address.strip())
