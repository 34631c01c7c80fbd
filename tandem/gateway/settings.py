"""Settings of a gateway, from flags and `TANDEM_*` variables. Defines names, units and limits; decides nothing."""

import re
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from tandem.accounts.store import LEASE_S
from tandem.gateway.body import BodyLimits
from tandem.serving.peer_settings import PeerSettings
from tandem.serving.settings import Address, required_secret

_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


class GatewaySettings(PeerSettings, cli_prog_name="python -m services.gateway"):
    """HTTP in, router and decode workers behind: the process that clients talk to. Computes nothing itself."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    admin_bind: Address | None = Field(
        None,
        description="host:port of /metrics and /admin; port 0 = any free one; omitted: they are on --port, for a key "
        "of an admin where there are accounts, else only where --host is a loopback address",
    )
    routers: str = Field(
        "127.0.0.1:7800", description="routers as host:port,host:port; the next serves when one is away"
    )
    model: str = Field(description="directory or hub id of the tokenizer and chat template that the workers serve")
    served_model_name: str | None = Field(
        None, description="name that clients ask for and workers serve; omitted: the directory's name"
    )
    tool_parser: str = Field(
        "auto",
        description="how the model writes tool calls: auto (by its template), none, hermes, llama3_json, "
        "llama_pythonic or mistral",
    )
    reasoning_parser: str = Field(
        "auto", description="how it marks thinking: auto (by its template), none, think, mistral, or START,END"
    )
    moderation: str | None = Field(
        None,
        description="judges prompts and answers: blocklist:FILE, an http(s) URL that speaks OpenAI's moderation API, "
        "or python:MODULE:CALLABLE; omitted: nobody",
    )
    redis: str | None = Field(
        None,
        description="redis://… that gateways share: stored responses, paid cache pins; omitted: each has its own",
    )
    stored_responses_mib: float | None = Field(
        None, ge=1, description="stored responses in all, MiB; default 128 in Redis, which others need too, else 512"
    )
    responses_key: SecretStr | None = Field(
        None,
        description="encrypts stored responses in Redis, the same for all gateways; NEW,OLD: the first encrypts, all "
        "decrypt; omitted: made from the cluster secret, which workers know too",
    )
    max_concurrent_requests: int = Field(1024, ge=1, le=65536, description="HTTP requests served at once; past it 429")
    max_choices: int = Field(256, ge=1, le=4096, description="prompts times n of one request")
    max_messages: int = Field(8192, ge=1, description="messages of one chat request")
    max_body_mib: float = Field(32.0, gt=0, le=1024, description="longest request body, MiB")
    max_body_values: int = Field(
        2**20, ge=1, le=2**26, description="entries and members in all arrays and objects of one body; past it 413"
    )
    max_body_members: int = Field(
        2**17, ge=1, le=2**26, description="members of objects, and arrays and objects, in one body; past it 413"
    )
    request_timeout_s: float = Field(1800.0, gt=0, description="longest life of a request, seconds; past it 504")
    router_timeout_s: float = Field(0.5, gt=0, description="a router silent for this long is away, seconds")
    silent_after_s: float = Field(
        0.75, gt=0, description="a stream silent for this long has its worker asked for a sign of life, seconds"
    )
    worker_timeout_s: float = Field(1.0, gt=0, description="a worker asked for a sign of life answers in this, seconds")
    max_attempts: int = Field(4, ge=1, le=64, description="workers tried for one choice before it fails")
    failover_timeout_s: float = Field(
        15.0,
        ge=0,
        description="how long a request, begun or new, waits for a worker to come or to come back while none can serve "
        "it, or for a router, seconds; past it 503, or an error that ends the stream; 0 = not at all",
    )
    room_timeout_s: float = Field(
        60.0,
        ge=0,
        description="how long a request waits for its turn while every worker's KV cache is promised away, seconds; "
        "past it 429; 0 = not at all",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="after SIGTERM streams may go on for this long, seconds")
    allowed_origins: str = Field(
        "",
        description="web pages that may call from browsers: https://chat.example,… or *; omitted: none but our own",
    )
    allowed_hosts: str = Field(
        "",
        description="names by which clients call this gateway, where it asks for no keys: llm.example,*.lan,… or *; "
        "localhost, --host and IP addresses always are",
    )
    allow_anonymous: bool = Field(False, description="listen beyond loopback though no keys are asked for")
    accounts: SecretStr | None = Field(
        None,
        description="where API keys, limits and the ledger are: redis:// URL, or a file for one gateway; omitted: no "
        "keys are asked for, which beyond loopback needs --allow-anonymous",
    )
    accounts_when_lost: Literal["refuse", "allow"] = Field(
        "refuse", description="requests while the accounts' Redis is away: refuse, or allow: no limits, billed later"
    )
    accounts_lease_s: float = Field(
        LEASE_S,
        ge=1,
        le=3600,
        description="what a killed gateway set aside comes back after so many seconds, less what its clients got: that"
        " is billed as it was up to a twelfth of this before the end",
    )
    accounts_journal: Path | None = Field(
        None, description="file for bills that Redis has not taken, so that they outlive this process; omitted: none"
    )
    prices: str | None = Field(
        None, description='JSON or a file of it: {"input": 1, "output": 5}, units for a million tokens; omitted: all 0'
    )
    cluster_secret: SecretStr | None = Field(None, description="shared by all processes of a cluster; required")
    log_level: str = Field("info", description="debug, info, warning or error")
    log_format: str = Field("text", description="text, or json: one object a line")
    otlp_endpoint: str | None = Field(None, description="URL that OpenTelemetry spans are sent to; omitted: none")

    @field_validator("routers")
    @classmethod
    def _check_routers(cls, value: str) -> str:
        for address in value.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address.strip()!r} is not host:port")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        for origin in _listed(value):
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"{origin!r} is not scheme://host[:port] without a path, nor *")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: str) -> str:
        for host in _listed(value):
            if host != "*" and _HOST.fullmatch(host) is None:
                raise ValueError(f"{host!r} is no host name without a port, no *.name and not *")
        return value

    @property
    def hosts(self) -> tuple[str, ...]:
        return _listed(self.allowed_hosts)

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of the operators' port, or None."""
        host, _, port = (self.admin_bind or "").rpartition(":")
        return (host, int(port)) if host else None

    @property
    def origins(self) -> tuple[str, ...]:
        return _listed(self.allowed_origins)

    @property
    def body_limits(self) -> BodyLimits:
        return BodyLimits(int(self.max_body_mib * 2**20), self.max_body_values, self.max_body_members)

    @property
    def router_addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.routers.split(","))

    @cached_property
    def secret(self) -> bytes:
        """The cluster's secret; raises as `required_secret`."""
        return required_secret(self.cluster_secret, f"routers={self.routers!r}")

    @property
    def responses_keys(self) -> tuple[bytes, ...]:
        """Keys that encrypt stored responses, newest first."""
        if self.responses_key is None:
            return (self.secret,)
        listed = self.responses_key.get_secret_value().split(",")
        return tuple(key.strip().encode() for key in listed if key.strip())


def _listed(names: str) -> tuple[str, ...]:
    """NOTE: browsers write origins and hosts in lower case."""
    return tuple(name.strip().lower() for name in names.split(",") if name.strip())
