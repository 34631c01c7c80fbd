"""Authorisation of the fake API server: tokens and rules, as in Roles."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.helpers.kube_fake.store import ApiError


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a Role. `names` empty = any object."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()

    def allows(self, verb: str, group: str, resource: str, name: str) -> bool:
        is_named = not self.names or (name in self.names and verb != "create")
        return verb in self.verbs and (group, resource) == (self.group, self.resource) and is_named


class Rules:
    """`admin_token` may do everything; others what they were granted."""

    def __init__(self) -> None:
        self.admin_token = "admin-1"
        self._granted: dict[str, Sequence[Rule]] = {}

    def grant(self, token: str, rules: Sequence[Rule]) -> None:
        self._granted[token] = rules

    def require(self, header: str, verb: str, group: str, resource: str, name: str) -> None:
        token = header.removeprefix("Bearer ")
        if token == self.admin_token:
            return
        if token not in self._granted:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if not any(rule.allows(verb, group, resource, name) for rule in self._granted[token]):
            kind = f"{resource.split('/')[0]}{'.' + group if group else ''}"
            raise ApiError(
                403,
                "Forbidden",
                f'{kind} "{name}" is forbidden: User "{token}" cannot {verb} resource "{resource}"'
                f' in API group "{group}"',
            )
