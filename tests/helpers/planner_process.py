"""The planner's own process beside a real cluster, asked over HTTP."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.process.ports import free_ports
from tests.helpers.cluster import ROOT, Cluster
from tests.helpers.secret import SECRET

PATIENT_S = 60.0


class PlannerProcess:
    """`python -m services.planner` of the release at `root`, which serves its metrics at `host`."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        root: Path = ROOT,
        host: str = "127.0.0.1",
    ) -> None:
        (port,) = free_ports(1, host, random.Random())
        self._http = httpx.Client(base_url=f"http://{host}:{port}", trust_env=False, timeout=10.0)
        self._log = directory / f"planner-{port}.log"
        argv = cluster.processes["gateway"].spec.argv
        told = {
            "TANDEM_GATEWAYS": cluster.url.removeprefix("http://"),
            "TANDEM_ROUTERS": argv[argv.index("--routers") + 1],
            "TANDEM_HOST": host,
            "TANDEM_METRICS_PORT": str(port),
            "TANDEM_INTERVAL_S": "0.5",
            "TANDEM_WARMUP_S": "0",
            "TANDEM_CLUSTER_SECRET": SECRET.decode(),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.planner", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root), **told, **(env or {})},
            )

    def page(self) -> dict[str, Any]:
        """JSON that /plan answers."""
        said: dict[str, Any] = self._http.get("/plan").json()
        return said

    def metrics(self) -> dict[tuple[str, ...], float]:
        """By sample name and label values."""
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def wait(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first page of which it holds."""
        deadline_s = time.monotonic() + PATIENT_S
        while True:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.HTTPError, KeyError, TypeError):
                page = self.page()
                if holds(page):
                    return page
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20.0)

    def close(self) -> None:
        self._http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
