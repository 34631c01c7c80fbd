"""Refuses requests that a web page of another site makes its visitor's browser send to a gateway without API keys.

Two checks, before a body is read. `Host`: a page whose name was pointed at our address (DNS rebinding) has our origin
and could read every answer. `Origin`: a page of another site needs no preflight to POST plain text. With accounts
neither check is needed: such pages cannot send a key's header without a preflight.
"""

from collections.abc import Collection
from ipaddress import ip_address

from starlette.types import Scope

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.operator_port import is_closed_to_pages

_ANY = "*"
_LOCAL_NAME = "localhost"


class BrowserRules:
    """Checks of `Host` and `Origin` for a gateway without accounts.

    Args:
        hosts: names of this gateway besides loopback's and all IP addresses; `*.example`: every name below it; `*`:
            any.
        origins: web origins of other sites that may call it; `*`: every one.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        self._parents = tuple(host[1:] for host in hosts if host.startswith("*."))
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> None:
        """Raises RequestError with status 403, naming the refused value and the setting that allows it."""
        hosts = _values(scope, b"host")
        for host in hosts:
            if not self._is_ours(_name_of(host)):
                raise RequestError(
                    f"Host {shown(host)} is no name of this gateway, which asks for no keys: name it in "
                    "--allowed-hosts (TANDEM_ALLOWED_HOSTS) if it is one",
                    code="host_not_allowed",
                    status=403,
                )
        for origin in _values(scope, b"origin"):
            if not (_is_same(origin, hosts) or self._may_call(origin, scope["path"])):
                raise RequestError(
                    f"Origin {shown(origin)} is a page of another site, and this gateway asks for no keys: name it in "
                    "--allowed-origins (TANDEM_ALLOWED_ORIGINS) if it may call /v1; none may call /admin or /metrics",
                    code="origin_not_allowed",
                    status=403,
                )

    def _is_ours(self, name: str) -> bool:
        """NOTE: DNS cannot point an address elsewhere, so every address is ours. Browsers always send a host."""
        if name == _LOCAL_NAME or name.endswith(f".{_LOCAL_NAME}") or _is_address(name):
            return True
        return _ANY in self._hosts or name in self._hosts or name.endswith(self._parents)

    def _may_call(self, origin: str, path: str) -> bool:
        return not is_closed_to_pages(path) and (_ANY in self._origins or origin in self._origins)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip().lower() for key, value in scope["headers"] if key == name]


def _is_same(origin: str, hosts: Collection[str]) -> bool:
    """Whether a page of `origin` is our own. Schemes are not compared: a proxy in front of us may use another one."""
    _, has_scheme, authority = origin.partition("://")
    return bool(has_scheme) and _without_default_port(authority) in map(_without_default_port, hosts)


def _without_default_port(authority: str) -> str:
    return authority.removesuffix(":80").removesuffix(":443")


def _name_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
