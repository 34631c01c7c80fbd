"""Discovery through the Kubernetes API: the ready pods that a selector matches are the workers.

Workers need not announce themselves. Invariant: a pod is listed while it is ready (readiness gates included) and not
terminating. A worker that leaves the list is still watched while it lives, so draining is observed to its end. While
the API is unreachable, calls raise.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from tandem.core.errors import LocalityUnavailableError
from tandem.kube.api import KubeApi
from tandem.kube.pod import Pod
from tandem.kube.pod_watch import PodWatch, WatchTerms
from tandem.rpc.messages import WorkerAddress, WorkerRecord

ROLE_LABEL, MODEL_LABEL = "tandem.dev/role", "tandem.dev/model"
PORT = "grpc"  # name of the container port for gRPC


class KubernetesDiscovery:
    """`Discovery` for routers. Starts to list pods at the first call; owns `api` and closes it.

    Args:
        first_wait_s: time for which the first call waits for the first list.
    """

    def __init__(
        self, api: KubeApi, selector: str, terms: WatchTerms | None = None, *, first_wait_s: float = 1.0
    ) -> None:
        self._api = api
        self._watch = PodWatch(api, selector, terms)
        self._first_wait_s = first_wait_s
        self._task: asyncio.Task[None] | None = None

    async def announce(self, record: WorkerRecord) -> None:
        """Nothing to do: Kubernetes knows its pods."""

    async def withdraw(self, record: WorkerRecord) -> None:
        """Nothing to do: a pod that ends is no longer ready."""

    async def workers(self) -> Sequence[WorkerRecord]:
        await self._listing()
        if self._watch.failure is not None:
            raise LocalityUnavailableError(str(self._watch.failure)) from self._watch.failure
        if not self._watch.tried.is_set():
            raise LocalityUnavailableError("the Kubernetes API has not listed the pods yet; it is tried again")
        records = [record_of(pod) for pod in self._watch.pods]
        return [record for record in records if record is not None]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._api.close()

    async def _listing(self) -> None:
        """Start the listing task if necessary, and wait briefly for the first list."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch.run(), name="pods")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._first_wait_s):
                    await self._watch.tried.wait()
        if self._task.done():
            self._task.result()  # NOTE: it never ends but by a bug or settings that cannot work; this raises them


def record_of(pod: Pod) -> WorkerRecord | None:
    """Returns the record of a pod's worker, with the pod's name as id; None while it cannot receive requests."""
    port = pod.ports.get(PORT)
    if not pod.ip or port is None or not pod.ready or pod.deleting:
        return None
    address = f"[{pod.ip}]:{port}" if ":" in pod.ip else f"{pod.ip}:{port}"
    return WorkerRecord(
        WorkerAddress(pod.name, address),
        role=pod.labels.get(ROLE_LABEL, ""),
        model=pod.labels.get(MODEL_LABEL, ""),
        pool="",
    )
