"""URLs of a Redis whose master Sentinels name: `redis+sentinel://user:password@host:port,host:port/service/db`.

Plain values; connects nowhere. `rediss+sentinel://` is TLS, to the Sentinels too, with the CA in the option
ssl_ca_certs. Name and password before the hosts are the master's; options sentinel_username and sentinel_password are
the Sentinels'.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tandem.core.addresses import check_host

_SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}
_PORT = 26379
_OPTIONS = ("sentinel_username", "sentinel_password", "ssl_ca_certs")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """addresses: (host, port) of the Sentinels. service: the master's name there."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    is_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None

    @staticmethod
    def is_one(url: str) -> bool:
        """Whether a URL has this scheme."""
        return url.partition("://")[0].lower() in _SCHEMES

    @classmethod
    def parse(cls, url: str) -> "SentinelUrl":
        """Parses a URL. Raises ValueError for another scheme, or without a service."""
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        username, _, password = user.partition(":")
        service, _, db = parts.path.removeprefix("/").partition("/")
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        if not service or parts.scheme not in _SCHEMES or options.keys() - set(_OPTIONS):
            raise ValueError(f"a service and no other options than {', '.join(_OPTIONS)} are needed")
        return cls(
            addresses=tuple(map(_address, hosts.split(","))),
            service=unquote(service),
            db=int(db or 0),
            is_tls=_SCHEMES[parts.scheme],
            username=unquote(username) or None,
            password=unquote(password) or None,
            **options,
        )

    def sentinel_options(self) -> dict[str, Any]:
        """Options of connections to the Sentinels, as named by redis-py."""
        return {**self._tls(), "username": self.sentinel_username, "password": self.sentinel_password}

    def master_options(self) -> dict[str, Any]:
        """Options of connections to the master, as named by redis-py."""
        return {**self._tls(), "db": self.db, "username": self.username, "password": self.password}

    def _tls(self) -> dict[str, Any]:
        return {"ssl": True, "ssl_ca_certs": self.ssl_ca_certs} if self.is_tls else {"ssl": False}


def _address(text: str) -> tuple[str, int]:
    parts: SplitResult = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is needed")
    check_host(parts.hostname)
    return parts.hostname, parts.port or _PORT
