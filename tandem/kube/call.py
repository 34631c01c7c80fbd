"""One call to the Kubernetes API: its RBAC names and its HTTP path. Sends nothing."""

from dataclasses import dataclass
from urllib.parse import quote

_METHODS = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH"}


@dataclass(frozen=True, slots=True)
class KubeCall:
    """A call, in the terms of RBAC.

    `resource` as in a Role: "pods", "deployments/scale"; `group` "": core API; `name` "": all objects.
    """

    verb: str
    resource: str
    namespace: str
    name: str = ""
    group: str = ""
    version: str = "v1"

    @property
    def method(self) -> str:
        return _METHODS[self.verb]

    @property
    def path(self) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        kind, _, part = self.resource.partition("/")
        pieces = [root, "namespaces", quote(self.namespace, safe=""), kind]
        if part or self.verb != "create":
            pieces += [quote(self.name, safe="")] if self.name else []
        return "/".join([*pieces, part] if part else pieces)

    def __str__(self) -> str:
        named = f" {self.name!r}" if self.name else ""
        return f"{self.verb} {self.resource}{named} in namespace {self.namespace!r}"
