"""The fake's HTTP: paths, verbs, selectors, pages, watches and errors as a Kubernetes API server has them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from tandem.kube.access import Access
from tests.helpers.kube_fake import pods
from tests.helpers.kube_fake.patches import patched
from tests.helpers.kube_fake.request import KINDS, Asked, asked_of
from tests.helpers.kube_fake.rules import Rule, Rules
from tests.helpers.kube_fake.store import ApiError, Store
from tests.helpers.kube_fake.watch import watch

__all__ = ["KubeFake", "Rule", "running_fake"]

Body = dict[str, Any]


class KubeFake:
    """Made by `running_fake`.

    `answers`: given instead of what would have been, one a call. `calls`: "verb resource name" of every call. `rules`:
    what tokens may do. `bookmarks`: set it, and every watch that wants bookmarks sends one.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.rules = Rules()
        self.answers: list[web.Response] = []
        self.calls: list[str] = []
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._stopping = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def access(self, token: str = "", **fields: Any) -> Access:
        """For the administrator, unless `token` says who else."""
        return Access(url=self.url, token=token or self.rules.admin_token, **fields)

    async def start(self) -> None:
        """Listen, again at the same port."""
        self._stopping = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a server that is killed: watches break off, nobody listens. What is stored stays."""
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def put_pod(self, name: str, namespace: str = "default", *, ready: bool = True, **fields: Any) -> None:
        """Make or change a pod; `fields` are those of `pod_body`."""
        body = pods.pod_body(name, is_ready=ready, **fields)
        key = ("pods", namespace, name)
        exists = any(pod["metadata"]["name"] == name for pod in self.store.list("pods", namespace))
        self.store.replace(key, body) if exists else self.store.create(key, body)

    def end_pod(self, name: str, namespace: str = "default") -> None:
        """It is told to end, or, without a node, is gone."""
        pods.end_pod(self.store, namespace, name, None)

    def put_deployment(self, name: str, num_replicas: int, namespace: str = "default") -> None:
        selector = {"matchLabels": {"app": name}}
        body = {"kind": "Deployment", "spec": {"replicas": num_replicas, "selector": selector}}
        self.store.create(("deployments", namespace, name), body)

    def num_replicas(self, deployment: str, namespace: str = "default") -> int:
        return int(self.store.get(("deployments", namespace, deployment))["spec"]["replicas"])

    def holder(self, lease: str, namespace: str = "default") -> str:
        """Holder of a lease; "" = nobody."""
        return str(self.store.get(("leases", namespace, lease))["spec"].get("holderIdentity", ""))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = asked_of(request)
            self.calls.append(f"{asked.verb} {asked.resource} {asked.name}".strip())
            self.rules.require(
                request.headers.get("Authorization", ""), asked.verb, asked.group, asked.resource, asked.name
            )
            if self.answers:
                return self.answers.pop(0)
            if asked.verb == "watch":
                return await watch(request, asked, self.store, self._stopping)
            code = 201 if asked.verb == "create" else 200
            return web.json_response(self._do(asked, await _body_of(request), request.content_type), status=code)
        except ApiError as error:
            return refusal(error)
        except ValueError as error:
            return refusal(ApiError(400, "BadRequest", str(error)))

    def _do(self, asked: Asked, body: Any, content_type: str) -> Body:
        if asked.part == "scale":
            return self._scale(asked, body, content_type)
        if asked.verb == "list":
            return _page(asked, self.store)
        if asked.verb == "get":
            return self.store.get(asked.key)
        if asked.verb == "create":
            made = pods.new_pod(body) if asked.resource == "pods" else body
            return self.store.create((*asked.key[:2], body["metadata"]["name"]), made)
        if asked.verb == "delete":
            return self._delete(asked, body)
        known = self.store.get(asked.key)
        found = patched(known, body, content_type) if asked.verb == "patch" else body
        return self.store.replace(asked.key, _kept(known, found, asked.part))

    def _delete(self, asked: Asked, body: Any) -> Body:
        if asked.key[0] != "pods":
            return self.store.delete(asked.key)
        grace = asked.query.get("gracePeriodSeconds", (body or {}).get("gracePeriodSeconds"))
        return pods.end_pod(self.store, asked.namespace, asked.name, None if grace is None else int(grace))

    def _scale(self, asked: Asked, body: Any, content_type: str) -> Body:
        deployment = self.store.get(asked.key)
        scale = _scale_of(deployment)
        if asked.verb in ("patch", "update"):
            wanted = patched(scale, body, content_type) if asked.verb == "patch" else body
            replicas = wanted["spec"].get("replicas", 0)
            if not isinstance(replicas, int) or replicas < 0:
                raise ApiError(422, "Invalid", "spec.replicas: must be greater than or equal to 0")
            deployment["spec"]["replicas"] = replicas
            deployment["metadata"]["resourceVersion"] = (wanted.get("metadata") or {}).get("resourceVersion", "")
            scale = _scale_of(self.store.replace(asked.key, deployment))
        return scale


@contextlib.asynccontextmanager
async def running_fake() -> AsyncIterator[KubeFake]:
    """At a free port of loopback, for the time of the block."""
    fake = KubeFake()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


def refusal(error: ApiError) -> web.Response:
    details: Body = {"causes": [{"reason": reason, "message": reason} for reason in error.causes]}
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(error)}
    headers = {} if error.after_s is None else {"Retry-After": str(error.after_s)}
    body = {**status, "reason": error.reason, "details": details, "code": error.code}
    return web.json_response(body, status=error.code, headers=headers)


async def _body_of(request: web.Request) -> Any:
    return json.loads(await request.read() or b"null")


def _page(asked: Asked, store: Store) -> Body:
    """One page of a list; a page that follows is of the same moment, unless that was forgotten."""
    found: Sequence[Mapping[str, Any]] = [
        one for one in store.list(asked.resource, asked.namespace) if asked.matches(one)
    ]
    version, begin = str(store.version), 0
    if "continue" in asked.query:
        version, _, offset = asked.query["continue"].partition(":")
        store.since(int(version))
        begin = int(offset)
    end = begin + int(asked.query.get("limit", "0") or 0) if int(asked.query.get("limit", "0")) else len(found)
    meta = {"resourceVersion": version, **({"continue": f"{version}:{end}"} if end < len(found) else {})}
    return {"kind": f"{KINDS[asked.resource]}List", "apiVersion": "v1", "metadata": meta, "items": found[begin:end]}


def _kept(known: Body, found: Body, part: str) -> Body:
    """A write to the object leaves its status alone, a write to its status all else; only some kinds are so divided."""
    if known.get("kind") not in ("Pod", "Deployment"):
        return found
    version = (found.get("metadata") or {}).get("resourceVersion", "")
    if part == "status":
        return {
            **known,
            "status": found.get("status", {}),
            "metadata": {**known["metadata"], "resourceVersion": version},
        }
    return {**found, "status": known.get("status", {})}


def _scale_of(deployment: Body) -> Body:
    meta = {name: deployment["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": meta,
        "spec": {"replicas": deployment["spec"].get("replicas", 1)},
        "status": {"replicas": (deployment.get("status") or {}).get("replicas", 0), "selector": ""},
    }
