"""Settings of a further host of a worker's ranks, from flags and `TANDEM_*` variables."""

from functools import cached_property
from ipaddress import IPv6Address
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from tandem.process.peer_settings import PeerSettings
from tandem.process.settings import Address, required_secret
from tandem.ranks.host_kv import KVEndpoint
from tandem.rpc.credentials import Credentials, ProcessRole


class RankHostSettings(PeerSettings, cli_prog_name="python -m services.rank_host"):
    """A further host of a worker's ranks: joins the worker that leads them, starts its share of their processes, and
    ends with it. The model must be at the same path as at the worker.
    """

    leader: Address = Field(description="host:port at which the worker waits for its hosts (its --ranks-bind)")
    cluster_secret: SecretStr | None = Field(None, description="secret shared by all processes of a cluster; required")
    kv_bind: Address = Field(
        "127.0.0.1:0", description="host:port at which peers read the KV of these ranks; port 0 = any free one"
    )
    advertise_host: str | None = Field(
        None, description="host under which peers reach kv_bind, required if that is a wildcard; omitted: its own"
    )
    host: str = Field("127.0.0.1", description="address of the metrics server")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of /metrics and /health; 0 = any free one; omitted: none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text, or json: one object a line")

    @field_validator("advertise_host")
    @classmethod
    def _has_no_port(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host = value.strip("[]")
        if not host or (":" in host and not _is_ipv6(host)):
            raise ValueError("needs a host without a port, such as 10.0.0.3; the port is that of kv_bind")
        return host

    @property
    def leader_address(self) -> tuple[str, int]:
        host, _, port = self.leader.rpartition(":")
        return host.strip("[]"), int(port)

    @cached_property
    def secret(self) -> bytes:
        """The cluster's secret; raises `ConfigurationError` if it is missing or too short."""
        return required_secret(self.cluster_secret, f"leader={self.leader!r}")

    def own_credentials(self) -> Credentials:
        """Credentials of this process for calls to and from others; raises `ConfigurationError` if it can have none."""
        return self.credentials(self.secret, ProcessRole.BOTH, [self.leader, self.kv_bind])

    def endpoint(self, credentials: Credentials) -> KVEndpoint:
        """Address at which other workers read the KV of this host's ranks, and its credentials."""
        host, _, port = self.kv_bind.rpartition(":")
        return KVEndpoint(self.secret, host.strip("[]"), int(port), self.advertise_host, credentials.tls)


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True
