"""Secrets of a cluster, as Helm's `lookup` finds them: real Helm against an API server that has Secrets only."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import yaml

from tests.helpers.helm import CHART, NAME, NAMESPACE, Object

DATE_FORM = "%Y-%m-%dT%H:%M:%SZ"
_RESOURCES = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [
        {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get", "list"]}
    ],
}


class HelmCluster:
    """A release whose Secrets are stored as an upgrade makes them. Only their rendering is Helm's; nothing runs.

    Attributes:
        secrets: by name, as the API server has them.
        notes: those of the last upgrade.
    """

    def __init__(self, url: str, secrets: dict[str, Object]) -> None:
        self.secrets = secrets
        self.notes = ""
        self._config = helm_python.Config(storage_driver="memory", kube_apiserver=url)
        self._chart = helm_python.Chart.load(str(CHART))

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Renders the chart, which finds the Secrets that are there, and stores those that it makes."""
        made = self._config.render(
            self._chart, dict(values), name=NAME, namespace=NAMESPACE, is_install=False, is_upgrade=True
        )
        self.notes = "".join(text for path, text in made.items() if path.endswith("NOTES.txt"))
        found = (each for path, text in made.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text))
        secrets = {each["metadata"]["name"]: each for each in found if each and each["kind"] == "Secret"}
        self.secrets.clear()
        self.secrets.update(secrets)

    def data(self, name: str) -> dict[str, bytes]:
        """Of the Secret whose name has `name` after the release's."""
        stored = self.secrets[f"{NAME}-tandem-{name}"]["data"]
        return {key: base64.b64decode(value, validate=True) for key, value in stored.items()}

    def age(self, period: timedelta) -> None:
        """Lets time pass, as far as the chart can see: the dates that it has written become earlier."""
        for secret in self.secrets.values():
            dates = secret["metadata"].get("annotations", {})
            for key, value in dates.items():
                dates[key] = (datetime.strptime(value, DATE_FORM) - period).strftime(DATE_FORM)

    def close(self) -> None:
        self._config.close()


@contextmanager
def helm_cluster() -> Iterator[HelmCluster]:
    """A cluster without Secrets, at a port of loopback."""
    secrets: dict[str, Object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/api/v1/namespaces/{NAMESPACE}/secrets/"
            found = _RESOURCES if path == "/api/v1" else secrets.get(path.removeprefix(prefix))
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    cluster = HelmCluster(f"http://127.0.0.1:{server.server_address[1]}", secrets)
    try:
        yield cluster
    finally:
        cluster.close()
        server.shutdown()
        thread.join()
        server.server_close()
