"""The chart as a release in the test's cluster: installed, upgraded, scaled, evicted and drained as an operator would.

Values are for one machine's CPU and the demo checkpoint; nothing else of the chart is left out.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helm_python import Config

from tests.kubernetes.background import Background
from tools.images import Images
from tools.kubernetes.api import MERGE, ApiError, Object
from tools.kubernetes.cluster import Cluster

ROOT = Path(__file__).parents[2]
MODEL = "tandem-demo"
NAME = "tandem"
NAMESPACE = "default"
WAIT_S = 300.0
DRAIN_S = 60
_POLL_S = 0.1
_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
Values = dict[str, Any]


def values_for(images: Images) -> Values:
    """Values of the chart that the tests install."""

    def image(name: str) -> dict[str, str]:
        repository, _, tag = name.rpartition(":")
        return {"repository": repository, "tag": tag, "pullPolicy": "Never"}

    probes = {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 10, "startupSeconds": 180}
    small = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    worker = {
        "replicas": 2,
        "settings": {
            "dtype": "float32",
            "kvCacheGib": 0.25,
            "numThreads": 1,
            "checksumShare": 1,
        },
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        "shm": {"sizeLimit": "64Mi"},
        "termination": {"preStopSeconds": 0, "drainSeconds": DRAIN_S},
        "probes": probes,
        "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    return {
        "model": {"uri": f"host://{ROOT / 'demo' / MODEL}"},
        "images": {"control": image(images.control), "worker": image(images.worker)},
        "redis": {"image": image(images.redis), "resources": small},
        "gateway": {
            "replicas": 2,
            "allowAnonymous": True,
            "resources": small,
            "probes": probes,
            "termination": {"preStopSeconds": 3, "drainSeconds": DRAIN_S},
        },
        "router": {
            "replicas": 2,
            "resources": small,
            "probes": probes,
            "termination": {"preStopSeconds": 3, "drainSeconds": 5},
            "settings": {"maxLocalTokens": 0},
        },
        "prefill": worker,
        "decode": worker,
        "tests": {"prompt": "The capital of France is"},
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """Values over values, as Helm lays them."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


class Release:
    """One release named `tandem`. All calls wait until what they ask for has happened."""

    def __init__(self, cluster: Cluster, background: Background, chart: Path, values: Values) -> None:
        self.cluster = cluster
        self.values = values
        self._background = background
        self._chart = chart
        self._helm = Config(kubeconfig_path=str(cluster.plane.kubeconfig), namespace=NAMESPACE)

    def install(self) -> None:
        self._helm.install(self._chart, NAME, self.values, namespace=NAMESPACE, wait="watcher", timeout=int(WAIT_S))

    def upgrade(self, changes: Values) -> None:
        """Helm upgrade with more values, which stay for later upgrades; waits until the rollout is over."""
        self.values = merged(self.values, changes)
        self._helm.upgrade(self._chart, NAME, self.values, namespace=NAMESPACE, wait="watcher", timeout=int(WAIT_S))
        for pool in ("gateway", "router", "prefill", "decode"):
            self.wait_rolled_out(pool)

    def test(self) -> None:
        """`helm test`. Raises HelmError when it failed."""
        self._helm.test(NAME, timeout=int(WAIT_S))

    def uninstall(self) -> None:
        """`helm uninstall`; waits until the pods are gone but that of the test hook, which Helm leaves by design."""
        self._helm.uninstall(NAME, timeout=int(WAIT_S))
        self.until(lambda: {component_of(pod) for pod in self.pods()} <= {"test"}, "every pod gone")

    def close(self) -> None:
        self._helm.close()

    def get(self, path: str, **query: str) -> Object:
        return self._background.call(self.cluster.api.get(path, **query))

    def create(self, path: str, body: Object) -> Object:
        return self._background.call(self.cluster.api.create(path, body))

    def patch(self, path: str, body: Object) -> Object:
        return self._background.call(self.cluster.api.patch(path, body, MERGE))

    @property
    def url(self) -> str:
        """Of the gateways' Service."""
        service = self.get(f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}-gateway")
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def pods(self, component: str | None = None) -> list[Object]:
        """Pods of the release, or of one component of it."""
        selector = f"app.kubernetes.io/instance={NAME}"
        if component is not None:
            selector += f",app.kubernetes.io/component={component}"
        found: list[Object] = self.get(_PODS, labelSelector=selector)["items"]
        return found

    def ready(self, component: str) -> set[str]:
        """Names of its pods that are ready and are not being deleted."""
        return {
            pod["metadata"]["name"]
            for pod in self.pods(component)
            if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        }

    def scale(self, component: str, num_replicas: int) -> float:
        """Set the replicas by the scale subresource; how long until just so many pods were there and ready, seconds."""
        self.patch(f"{_DEPLOYMENTS}/{NAME}-{component}/scale", {"spec": {"replicas": num_replicas}})
        return self.wait_rolled_out(component)

    def restart(self, component: str) -> float:
        """`kubectl rollout restart`; how long it took, seconds."""
        annotations = {"kubectl.kubernetes.io/restartedAt": str(time.time())}
        body = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
        self.patch(f"{_DEPLOYMENTS}/{NAME}-{component}", body)
        return self.wait_rolled_out(component)

    def evict(self, pod: str) -> bool:
        """Ask for a pod's eviction; False = its disruption budget refuses for now."""
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        try:
            self.create(f"{_PODS}/{pod}/eviction", body)
        except ApiError as error:
            if error.status == 429:
                return False
            if error.status != 404:
                raise
        return True

    def wait_rolled_out(self, component: str) -> float:
        """Until as many pods as are wanted are there, all new and ready; how long that took, seconds."""

        def is_done() -> bool:
            deployment = self.get(f"{_DEPLOYMENTS}/{NAME}-{component}")
            status, wanted = deployment["status"], deployment["spec"]["replicas"]
            seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
            counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")]
            return seen and counts == [wanted] * 3 and len(self.pods(component)) == wanted

        return self.until(is_done, f"{component} rolled out")

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> float:
        """Poll; how long it took, seconds."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begun_s < timeout_s, f"not {what} after {timeout_s:g} s"
            time.sleep(_POLL_S)
        return time.monotonic() - begun_s


def component_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
