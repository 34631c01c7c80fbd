"""Backends of the contract tests: the fake, or a real control plane, with the same administrator's functions."""

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tandem.kube.access import Access
from tests.helpers.kube_fake.pods import pod_body
from tests.helpers.kube_fake.rules import Rule
from tests.helpers.kube_fake.server import running_fake

_PATIENT_S = 30.0
_JSON = {"Content-Type": "application/strategic-merge-patch+json"}


class Plane(Protocol):
    """A control plane, as `tools.kubernetes.control_plane` has it."""

    url: str
    admin_token: str
    nobody: str
    nobody_token: str
    ca_file: Path

    def start_api_server(self) -> None: ...
    def stop_api_server(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One API server and a namespace in it for one test.

    Args:
        bookmark_s: a watch this long brings a bookmark.
        forget: have the server forget the versions that are past; it may be restarted for that.
    """

    url: str
    token: str
    namespace: str
    http: httpx.AsyncClient
    ca_file: Path | None = None
    bookmark_s: float = 1.0
    limited_token: str = "limited"
    grant: Callable[["Backend", Sequence[Rule]], Awaitable[None]] = field(kw_only=True, repr=False)
    forget: Callable[[], Awaitable[None]] = field(kw_only=True, repr=False)

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 443

    def access(self, *, port: int | None = None, token: str | None = None) -> Access:
        """For the administrator, unless `token` is somebody else's; `port`: of a gate before it."""
        url = str(httpx.URL(self.url).copy_with(port=port or self.port)).rstrip("/")
        return Access(url=url, token=self.token if token is None else token, ca_file=self.ca_file)

    async def put_pod(self, name: str, labels: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Make a pod, or change its labels and status; `fields` are those of `pod_body`."""
        body = pod_body(name, labels=labels, **fields)
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        made = await self.http.post(path, json={key: body[key] for key in ("apiVersion", "kind", "metadata", "spec")})
        if made.status_code == 409:
            relabelled = {"metadata": {"labels": dict(labels or {})}}
            made = await self.http.patch(f"{path}/{name}", json=relabelled, headers=_JSON)
        _require(made)
        shown = await self.http.patch(f"{path}/{name}/status", json={"status": body["status"]}, headers=_JSON)
        _require(shown)

    async def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        query = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        _require(await self.http.delete(f"/api/v1/namespaces/{self.namespace}/pods/{name}", params=query))

    async def put_deployment(self, name: str, num_replicas: int) -> None:
        labels = {"app": name}
        template = {"metadata": {"labels": labels}, "spec": pod_body(name)["spec"]}
        spec = {"replicas": num_replicas, "selector": {"matchLabels": labels}, "template": template}
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        _require(await self.http.post(f"/apis/apps/v1/namespaces/{self.namespace}/deployments", json=body))

    async def allow(self, rules: Sequence[Rule]) -> str:
        """The token of somebody who may do just this."""
        await self.grant(self, rules)
        return self.limited_token


def _require(response: httpx.Response) -> None:
    assert response.is_success, response.text


@contextlib.asynccontextmanager
async def fake_backend() -> AsyncIterator[Backend]:
    async with running_fake() as fake:

        async def grant(_: Backend, rules: Sequence[Rule]) -> None:
            fake.rules.grant("limited", rules)

        async def forget() -> None:
            fake.store.compact()

        headers = {"Authorization": f"Bearer {fake.rules.admin_token}"}
        async with httpx.AsyncClient(base_url=fake.url, headers=headers) as http:
            yield Backend(fake.url, fake.rules.admin_token, "default", http, grant=grant, forget=forget)


@contextlib.asynccontextmanager
async def real_backend(plane: Plane) -> AsyncIterator[Backend]:
    """A namespace of its own in a control plane that runs."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    headers = {"Authorization": f"Bearer {plane.admin_token}"}
    trust = ssl.create_default_context(cafile=str(plane.ca_file))
    async with httpx.AsyncClient(base_url=plane.url, headers=headers, verify=trust, timeout=_PATIENT_S) as http:
        meta = {"metadata": {"name": namespace}}
        _require(await http.post("/api/v1/namespaces", json={"apiVersion": "v1", "kind": "Namespace", **meta}))
        async with asyncio.timeout(_PATIENT_S):
            account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
            while not (await http.get(account)).json().get("secrets"):
                await asyncio.sleep(0.05)

        async def grant(backend: Backend, rules: Sequence[Rule]) -> None:
            await _bind(backend, plane.nobody, rules)

        async def forget() -> None:
            plane.stop_api_server()  # NOTE: not in another thread: the kernel ends the server with who started it
            plane.start_api_server()

        yield Backend(
            plane.url,
            plane.admin_token,
            namespace,
            http,
            plane.ca_file,
            bookmark_s=5.0,
            limited_token=plane.nobody_token,
            grant=grant,
            forget=forget,
        )
        _require(await http.delete(f"/api/v1/namespaces/{namespace}"))


async def _bind(backend: Backend, user: str, rules: Sequence[Rule]) -> None:
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{backend.namespace}"
    kinds = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "limited"}}
    listed = [
        {
            "apiGroups": [rule.group],
            "resources": [rule.resource],
            "verbs": list(rule.verbs),
            **({"resourceNames": list(rule.names)} if rule.names else {}),
        }
        for rule in rules
    ]
    _require(await backend.http.post(f"{path}/roles", json={**kinds, "kind": "Role", "rules": listed}))
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "limited"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    _require(await backend.http.post(f"{path}/rolebindings", json={**kinds, "kind": "RoleBinding", **binding}))
