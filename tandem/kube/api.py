"""Tandem's calls to the Kubernetes API, in one namespace. Plain values in and out; no policy, no retries.

Every call raises a `KubeError` that names verb, resource, namespace and remedy; none blocks the event loop, and each
can be cancelled at any time.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tandem.core.errors import ConfigurationError, shown
from tandem.kube import read
from tandem.kube.access import Access
from tandem.kube.call import KubeCall
from tandem.kube.errors import BadAnswerError, ExpiredError, error_of
from tandem.kube.lease import Lease, lease_body, lease_of
from tandem.kube.pod import Pod, PodEvent, PodList, pod_of, version_of

_T = TypeVar("_T")

_PAGE = 500
_MERGE = "application/merge-patch+json"
_GRACE_S = 10.0
_KINDS = {"ADDED": "added", "MODIFIED": "modified", "DELETED": "deleted"}


class KubeTransport(Protocol):
    """HTTP to an API server (`connection`); raises only `KubeError` and `ConfigurationError`. `ask` waits for the
    answer, a JSON object. `follow` yields the events of a watch until the server ends it, or raises when nothing has
    come for `silence_s`.
    """

    async def ask(
        self,
        call: KubeCall,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
    ) -> Mapping[str, Any]: ...

    def follow(
        self, call: KubeCall, *, query: Sequence[tuple[str, str]], silence_s: float
    ) -> AsyncGenerator[Mapping[str, Any], None]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Scale:
    """Wanted and existing replicas of a Deployment. `resource_version`: the server's version of what was read."""

    name: str
    num_wanted: int
    num_existing: int
    resource_version: str


class KubeApi:
    """The API in one namespace. Made by `open_api`; used and closed in one event loop.

    Args:
        page: number of pods in one page of a list.
    """

    def __init__(self, wire: KubeTransport, namespace: str, *, page: int = _PAGE) -> None:
        self._wire = wire
        self._page = page
        self.namespace = namespace

    async def list_pods(self, selector: str) -> PodList:
        """All current pods that match `selector`, as in `kubectl get -l`."""
        call = KubeCall("list", "pods", self.namespace)
        query = [("labelSelector", selector), ("limit", str(self._page))]
        try:
            return await self._listed(call, query)
        except ExpiredError:  # NOTE: the list changed too much between two pages: ask for it in one
            return await self._listed(call, query[:1])

    async def watch_pods(self, selector: str, resource_version: str, watch_s: float) -> AsyncGenerator[PodEvent, None]:
        """Events of these pods after `resource_version`, until the server ends the watch after `watch_s` seconds.

        A silent server is detected `_GRACE_S` seconds after the watch should have ended.

        Raises:
            ExpiredError: the server no longer has `resource_version`; list again.
        """
        assert resource_version, "a watch without a version would begin anywhere"
        call = KubeCall("watch", "pods", self.namespace)
        query = [
            ("watch", "true"),
            ("labelSelector", selector),
            ("resourceVersion", resource_version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(max(1, round(watch_s)))),
        ]
        async with contextlib.aclosing(self._wire.follow(call, query=query, silence_s=watch_s + _GRACE_S)) as events:
            async for event in events:
                yield _understood(call, _event_of, (call, event))

    async def read_scale(self, deployment: str) -> Scale:
        return await self._ask(KubeCall("get", "deployments/scale", self.namespace, deployment, "apps"), _scale_of)

    async def write_scale(self, deployment: str, num_replicas: int, resource_version: str = "") -> Scale:
        """Sets the wanted number of replicas.

        Args:
            resource_version: of the `Scale` on which the change is based; "" = unconditional.

        Raises:
            ConflictError: the Deployment has changed since `resource_version`.
        """
        call = KubeCall("patch", "deployments/scale", self.namespace, deployment, "apps")
        meta = {"metadata": {"resourceVersion": resource_version}} if resource_version else {}
        return await self._ask(call, _scale_of, {**meta, "spec": {"replicas": num_replicas}}, _MERGE)

    async def read_lease(self, name: str) -> Lease:
        return await self._ask(self._lease_call("get", name), lease_of)

    async def create_lease(self, lease: Lease) -> Lease:
        """Creates a lease. Raises `ConflictError` when one of this name exists."""
        return await self._ask(self._lease_call("create", lease.name), lease_of, lease_body(lease))

    async def replace_lease(self, lease: Lease) -> Lease:
        """Replaces a lease. Raises `ConflictError` when it has changed since `lease.resource_version`."""
        assert lease.resource_version, "without a version this would overwrite what another client wrote"
        return await self._ask(self._lease_call("update", lease.name), lease_of, lease_body(lease))

    async def close(self) -> None:
        await self._wire.close()

    def _lease_call(self, verb: str, name: str) -> KubeCall:
        return KubeCall(verb, "leases", self.namespace, name, "coordination.k8s.io")

    async def _ask(
        self,
        call: KubeCall,
        parse: Callable[[Mapping[str, Any]], _T],
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
    ) -> _T:
        return _understood(call, parse, (await self._wire.ask(call, body=body, content_type=content_type),))

    async def _listed(self, call: KubeCall, query: Sequence[tuple[str, str]]) -> PodList:
        pods: list[Pod] = []
        following = ""
        while True:
            page = await self._wire.ask(call, query=[*query, *([("continue", following)] if following else [])])
            found, following, version = _understood(call, _page_of, (page,))
            pods += found
            if not following:
                return PodList(tuple(pods), version)


def open_api(access: Access, namespace: str = "", *, timeout_s: float = 10.0) -> KubeApi:
    """A client of the API server; nothing is sent yet. `namespace` "" is that of `access`, else "default".

    Raises:
        ConfigurationError: the `kubernetes` package is not installed, or the kubeconfig is wrong.
    """
    try:
        from tandem.kube.connection import KubeConnection, namespace_of
    except ImportError as error:
        raise ConfigurationError(
            f"the Kubernetes API needs a package that is not installed ({error}); run: pip install 'tandem[kubernetes]'"
        ) from error
    return KubeApi(KubeConnection(access, timeout_s=timeout_s), namespace or namespace_of(access) or "default")


def _understood(call: KubeCall, parse: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    try:
        return parse(*arguments)
    except ValueError as error:
        raise BadAnswerError(call, f"{error}; check the address") from error


def _page_of(page: Mapping[str, Any]) -> tuple[list[Pod], str, str]:
    """Pods of a page, the token for the next page, and the list's version."""
    if not str(page.get("kind", "")).endswith("List"):
        raise ValueError(f"kind={shown(page.get('kind'))} is no list")
    following = read.text(read.mapping(page, "metadata"), "continue")
    return [pod_of(item) for item in read.items(page, "items")], following, version_of(page)


def _event_of(call: KubeCall, event: Mapping[str, Any]) -> PodEvent:
    kind, found = read.text(event, "type", None), read.mapping(event, "object")
    if kind == "ERROR":  # NOTE: so a watch says 410, inside an answer that began with 200
        raise error_of(call, read.number(found, "code", 500), found)
    if kind == "BOOKMARK":
        return PodEvent("bookmark", None, version_of(found))
    if kind not in _KINDS:
        raise ValueError(f"type={shown(kind)} is no event")
    return PodEvent(_KINDS[kind], pod_of(found), version_of(found))


def _scale_of(found: Mapping[str, Any]) -> Scale:
    meta, spec, status = read.mapping(found, "metadata"), read.mapping(found, "spec"), read.mapping(found, "status")
    return Scale(
        name=read.text(meta, "name", None),
        num_wanted=read.number(spec, "replicas"),
        num_existing=read.number(status, "replicas"),
        resource_version=read.text(meta, "resourceVersion"),
    )
