"""An HTTP request to the API: its verb, resource and selectors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.helpers.kube_fake.selectors import Question, field_question, label_question
from tests.helpers.kube_fake.store import ApiError, Key

KINDS = {
    "pods": "Pod",
    "events": "Event",
    "deployments": "Deployment",
    "leases": "Lease",
}
_GROUPS = {
    "pods": "",
    "events": "",
    "deployments": "apps",
    "leases": "coordination.k8s.io",
}
_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<kind>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[^/]+))?)?$"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Asked:
    """`resource` is as in a Role: with the part, when one is asked for."""

    verb: str
    group: str
    namespace: str
    kind: str
    name: str
    part: str
    query: Mapping[str, str]
    label: Question
    field: Question

    @property
    def resource(self) -> str:
        return f"{self.kind}/{self.part}" if self.part else self.kind

    @property
    def key(self) -> Key:
        return (self.kind, self.namespace, self.name)

    def matches(self, found: Mapping[str, Any]) -> bool:
        return self.label(found) and self.field(found)


def asked_of(request: web.Request) -> Asked:
    """Raises `ApiError` for a path that names nothing, `ValueError` for a selector that is none."""
    match = _PATH.match(request.path)
    if match is None or _GROUPS.get(match["kind"]) != (match["group"] or ""):
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    verb, name = _VERBS[request.method], match["name"] or ""
    if verb == "get" and not name:
        verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
    return Asked(
        verb=verb,
        group=match["group"] or "",
        namespace=match["namespace"],
        kind=match["kind"],
        name=name,
        part=match["part"] or "",
        query=dict(request.query),
        label=label_question(request.query.get("labelSelector", "")),
        field=field_question(request.query.get("fieldSelector", "")),
    )
