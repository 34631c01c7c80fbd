"""Permissions of roles: for every method except the handshake, the roles whose processes may call it.

A method that is not in the table is refused to every role.
"""

from collections.abc import Mapping

from tandem.rpc import methods
from tandem.rpc.credentials import WORKER_ROLES, ProcessRole

_GATEWAYS = frozenset({ProcessRole.GATEWAY})
_GATEWAYS_AND_TOOLS = frozenset({ProcessRole.GATEWAY, ProcessRole.OPERATOR})

ALLOWED: Mapping[str, frozenset[ProcessRole]] = {
    methods.STATUS.path: _GATEWAYS_AND_TOOLS,
    methods.WATCH.path: frozenset({ProcessRole.ROUTER, ProcessRole.PLANNER, ProcessRole.OPERATOR}),
    methods.DRAIN.path: frozenset({ProcessRole.OPERATOR}),
    methods.GENERATE.path: _GATEWAYS,
    methods.SERVE.path: _GATEWAYS,
    methods.PREFILL.path: WORKER_ROLES,
    methods.GREET.path: WORKER_ROLES,
    methods.LEASE.path: WORKER_ROLES,
    methods.RENEW.path: WORKER_ROLES,
    methods.CONFIRM.path: WORKER_ROLES,
    methods.RELEASE.path: WORKER_ROLES,
    methods.PAIR.path: _GATEWAYS,
    methods.SETTLE.path: _GATEWAYS,
    methods.DESCRIBE.path: _GATEWAYS_AND_TOOLS,
    methods.MODELS.path: _GATEWAYS_AND_TOOLS,
    methods.WORKERS.path: _GATEWAYS_AND_TOOLS | {ProcessRole.PLANNER},
    methods.DECISIONS.path: _GATEWAYS_AND_TOOLS,
    methods.REGISTER.path: WORKER_ROLES,
    methods.UNREGISTER.path: WORKER_ROLES,
    methods.PUBLISH.path: WORKER_ROLES,
    methods.REPLACE.path: WORKER_ROLES,
}


def permission_problem(role: str, path: str) -> str | None:
    """Reason why a process of that role may not call `path`; None if it may."""
    allowed = ALLOWED.get(path, frozenset())
    if role in allowed:
        return None
    return f"a {role} may not call {path.rpartition('/')[2]}; allowed: {', '.join(sorted(allowed)) or 'none'}"
