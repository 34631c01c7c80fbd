"""Settings of a gateway, from flags and `TANDEM_*` variables. Defines names, units and limits; decides nothing."""

import re
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from tandem.accounts.store import LEASE_S
from tandem.core.errors import ConfigurationError
from tandem.gateway.body import BodyLimits
from tandem.process.peer_settings import PeerSettings
from tandem.process.settings import Address, required_secret

_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


class GatewaySettings(PeerSettings, cli_prog_name="python -m services.gateway"):
    """The HTTP server that clients call; forwards requests to routers and decode workers. Computes nothing itself."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    admin_bind: Address | None = Field(
        None,
        description="host:port of /metrics and /admin; port 0 = any free one; omitted: served on --port, for admin "
        "keys if there are accounts, else only if --host is a loopback address",
    )
    routers: str = Field(
        "127.0.0.1:7800", description="routers as host:port,host:port; if one is unavailable, the next is used"
    )
    model: str = Field(description="directory or hub id of the tokenizer and chat template that the workers serve")
    served_model_name: str | None = Field(
        None, description="model name in requests and of the workers; omitted: the directory's name"
    )
    tool_parser: str = Field(
        "auto",
        description="format of the model's tool calls: auto (by its template), none, hermes, llama3_json, "
        "llama_pythonic or mistral",
    )
    reasoning_parser: str = Field(
        "auto", description="marks of the model's thinking: auto (by its template), none, think, mistral, or START,END"
    )
    moderation: str | None = Field(
        None,
        description="moderator of prompts and answers: blocklist:FILE, an http(s) URL that speaks OpenAI's moderation "
        "API, or python:MODULE:CALLABLE; omitted: none",
    )
    redis: str | None = Field(
        None,
        description="redis:// URL of the state that gateways share: stored responses, paid cache pins; omitted: kept "
        "in this process",
    )
    stored_responses_mib: float | None = Field(
        None, ge=1, description="memory for stored responses, MiB; omitted: 128 in Redis, which is shared, else 512"
    )
    responses_key: SecretStr | None = Field(
        None,
        description="key that encrypts stored responses in Redis, the same for all gateways; NEW,OLD: the first "
        "encrypts, all decrypt; omitted: derived from the cluster secret, which workers know too",
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, le=65536, description="maximum HTTP requests served at once; more get 429"
    )
    max_choices: int = Field(256, ge=1, le=4096, description="maximum of prompts times n in one request")
    known_prompts_mib: float = Field(
        128.0,
        ge=0,
        description="memory for the token ids of earlier turns, so that a chat's next turn is encoded only where it is "
        "new, MiB; 0 = every turn is encoded whole",
    )
    max_messages: int = Field(8192, ge=1, description="maximum messages of one chat request")
    max_body_mib: float = Field(32.0, gt=0, le=1024, description="maximum request body, MiB")
    max_body_values: int = Field(
        2**20,
        ge=1,
        le=2**26,
        description="maximum entries and members in all arrays and objects of one body; more get 413",
    )
    max_body_members: int = Field(
        2**17,
        ge=1,
        le=2**26,
        description="maximum members of objects, plus arrays and objects, in one body; more get 413",
    )
    request_timeout_s: float = Field(1800.0, gt=0, description="maximum duration of a request, seconds; then 504")
    router_timeout_s: float = Field(0.5, gt=0, description="timeout of a call to a router, seconds")
    silent_after_s: float = Field(
        0.75, gt=0, description="after this long without output the worker is probed, seconds"
    )
    worker_timeout_s: float = Field(
        1.0, gt=0, description="timeout of a probe, after which the worker counts as lost, seconds"
    )
    max_attempts: int = Field(4, ge=1, le=64, description="maximum workers tried for one choice")
    failover_timeout_s: float = Field(
        15.0,
        ge=0,
        description="how long a request, running or new, waits while no worker or router is available, seconds; then "
        "503, or an error that ends the stream; 0 = not at all",
    )
    room_timeout_s: float = Field(
        60.0,
        ge=0,
        description="how long a request waits in the queue while every worker's KV cache is full, seconds; then 429; "
        "0 = not at all",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="time for running streams to finish after SIGTERM, seconds")
    allowed_origins: str = Field(
        "",
        description="origins of web pages that may call from browsers: https://chat.example,… or *; omitted: only this "
        "gateway's own pages",
    )
    allowed_hosts: str = Field(
        "",
        description="host names of this gateway, checked if no keys are required: llm.example,*.lan,… or *; "
        "localhost, --host and IP addresses are always allowed",
    )
    allow_anonymous: bool = Field(False, description="listen beyond loopback although no keys are required")
    accounts: SecretStr | None = Field(
        None,
        description="store of API keys, limits and the ledger: redis:// URL, or a file for a single gateway; omitted: "
        "no keys are required, which beyond loopback needs --allow-anonymous",
    )
    accounts_when_lost: Literal["refuse", "allow"] = Field(
        "refuse",
        description="requests while the accounts' Redis is unavailable: refuse; or allow: without limits, billed later",
    )
    accounts_lease_s: float = Field(
        LEASE_S,
        ge=1,
        le=3600,
        description="reservations of a killed gateway expire after so many seconds; what its clients had received is "
        "billed, except for the last twelfth of this time",
    )
    accounts_journal: Path | None = Field(
        None,
        description="file for settlements that Redis has not accepted yet, so that they survive this process; "
        "omitted: none",
    )
    prices: str | None = Field(
        None,
        description='prices as JSON or a file of it: {"input": 1, "output": 5}, units per million tokens; omitted: '
        "1 and 5",
    )
    cluster_secret: SecretStr | None = Field(None, description="secret shared by all processes of a cluster; required")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field("text", description="text, or json: one object a line")
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
        """Keys that encrypt stored responses, newest first. Raises `ConfigurationError` if the setting holds none."""
        if self.responses_key is None:
            return (self.secret,)
        listed = self.responses_key.get_secret_value().split(",")
        found = tuple(key.strip().encode() for key in listed if key.strip())
        if not found:
            raise ConfigurationError("responses_key is empty; give a random key, or leave the setting out")
        return found


def _listed(names: str) -> tuple[str, ...]:
    """NOTE: browsers write origins and hosts in lower case."""
    return tuple(name.strip().lower() for name in names.split(",") if name.strip())
