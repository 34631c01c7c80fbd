"""Admits requests to a gateway without accounts. Invariant: decided before a body is read."""

from starlette.types import Scope

from tandem.gateway.accounts import Caller
from tandem.gateway.browser_rules import BrowserRules
from tandem.gateway.errors import RequestError
from tandem.gateway.operator_port import check_port, is_operator_path, is_operator_port


class OpenGuard:
    """Admits requests without an API key. `has_operators`: the public port answers /metrics and /admin/ too."""

    def __init__(self, rules: BrowserRules, *, has_operators: bool) -> None:
        self._rules = rules
        self._has_operators = has_operators

    async def admit(self, scope: Scope) -> Caller:
        """The anonymous caller. Raises RequestError for pages of other sites, and for operators' paths on this port."""
        self._rules.check(scope)
        check_port(scope)
        if is_operator_path(scope["path"]) and not (self._has_operators or is_operator_port(scope)):
            raise RequestError(
                f"{scope['path'][:128]} is not answered on this port: start the gateway with --admin-bind HOST:PORT "
                "(TANDEM_ADMIN_BIND) and ask there, or with --accounts and send an admin key",
                code="not_on_this_port",
                status=403,
            )
        return Caller()
