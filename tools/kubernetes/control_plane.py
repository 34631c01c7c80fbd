"""A real Kubernetes control plane on loopback: etcd, API server, controllers and scheduler, RBAC on, gone when stopped.

    with running_control_plane() as plane:
        plane.url, plane.admin_token, plane.ca_file, plane.kubeconfig

Everything it writes is in a temporary folder. Nothing here runs pods: see `tools.kubernetes.kubelet`.
It is Kubernetes 1.20: it has no policy/v1 and no autoscaling/v2 (v1beta1 and v2beta2 instead), and a pod's eviction is
asked for by a policy/v1beta1 body, or by one that names no version.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.kubernetes.binaries import VARIABLE, default_folder, missing_binaries
from tools.kubernetes.certificates import Certificates, make_certificates

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
_READY_S = 90.0
_STOP_S = 10.0
_UNWANTED_PLUGINS = "PersistentVolumeClaimResize,StorageObjectInUseProtection"


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one control plane."""

    api: int
    etcd: int
    etcd_peer: int

    @classmethod
    def free(cls) -> Ports:
        """Three that nobody listens at now."""
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in range(3)]
            for one in held:
                one.bind(("127.0.0.1", 0))
            return cls(*(one.getsockname()[1] for one in held))


class ControlPlane:
    """The four processes and how to reach them. `admin_token` may do everything, `nobody_token` nothing until bound."""

    def __init__(self, bin_dir: Path, folder: Path) -> None:
        self.folder = folder
        self.ports = Ports.free()
        self.url = f"https://127.0.0.1:{self.ports.api}"
        self.admin_token = secrets.token_hex(16)
        self.nobody = "tandem-nobody"
        self.nobody_token = secrets.token_hex(16)
        self._bin_dir = bin_dir
        self._certificates = self._write_credentials()
        self.ca_file = self._certificates.ca
        self.kubeconfig = self.write_kubeconfig(folder / "kubeconfig", self.admin_token)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tls = ssl.create_default_context(cafile=str(self.ca_file))

    def start(self) -> None:
        """Start all and wait until pods can be made. Raises RuntimeError with the end of the log that says why not."""
        self._launch("etcd", self._etcd_options())
        self.start_api_server()
        self._launch("kube-controller-manager", self._controller_options())
        self._launch("kube-scheduler", self._scheduler_options())
        self._wait("the default service account", self._has_service_account)

    def stop(self) -> None:
        """End every process, the last started first; what they kept goes with the folder."""
        for name in reversed(list(self._processes)):
            self._end(name, signal.SIGKILL)

    def start_api_server(self) -> None:
        """Start the API server, at the same address as before, and wait until it is ready."""
        self._launch("kube-apiserver", self._api_options())
        self._wait("the API server", lambda: self._get("/readyz") == b"ok")

    def stop_api_server(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the API server; what it kept is in etcd."""
        self._end("kube-apiserver", number)

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        """A kubeconfig for `token`; its default namespace is `default`."""
        cluster = {"server": self.url, "certificate-authority": str(self._certificates.ca)}
        context = {"cluster": "tandem", "user": "tandem", "namespace": "default"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tandem",
            "clusters": [{"name": "tandem", "cluster": cluster}],
            "users": [{"name": "tandem", "user": {"token": token}}],
            "contexts": [{"name": "tandem", "context": context}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(document, indent=1))
        return path

    def log(self, name: str, num_lines: int = 15) -> str:
        """The end of a process's log."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _write_credentials(self) -> Certificates:
        tokens = self.folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(
            f'{self.admin_token},tandem-admin,tandem-admin,"system:masters"\n{self.nobody_token},{self.nobody},{self.nobody}\n'
        )
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        return make_certificates(self.folder / "pki", names, ["127.0.0.1", API_SERVICE_ADDRESS])

    def _launch(self, name: str, options: dict[str, str]) -> None:
        command = [str(self._bin_dir / name), *(f"--{option}={value}" for option, value in options.items())]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = _spawn(command, log)

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if is_there():
                    return
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log(name)}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{what} is not there after {_READY_S:g} s:\n{self.log('kube-apiserver')}")
            time.sleep(0.1)

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.admin_token}"})
        with urllib.request.urlopen(request, timeout=5, context=self._tls) as response:
            body: bytes = response.read()
            return body

    def _has_service_account(self) -> bool:
        account = json.loads(self._get("/api/v1/namespaces/default/serviceaccounts/default"))
        return bool(account.get("secrets"))

    def _etcd_options(self) -> dict[str, str]:
        client, peer = f"http://127.0.0.1:{self.ports.etcd}", f"http://127.0.0.1:{self.ports.etcd_peer}"
        return {
            "data-dir": str(self.folder / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "logger": "zap",
            "log-level": "warn",
        }

    def _api_options(self) -> dict[str, str]:
        key = str(self._certificates.tokens_key)
        return {
            "bind-address": "127.0.0.1",
            "secure-port": str(self.ports.api),
            "tls-cert-file": str(self._certificates.serving),
            "tls-private-key-file": str(self._certificates.serving_key),
            "etcd-servers": f"http://127.0.0.1:{self.ports.etcd}",
            "token-auth-file": str(self.folder / "tokens.csv"),
            "authorization-mode": "RBAC",
            "anonymous-auth": "false",
            "service-cluster-ip-range": SERVICE_RANGE,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "disable-admission-plugins": _UNWANTED_PLUGINS,
            # NOTE: a loopback address is no endpoint; the harness routes the service of the API itself.
            "endpoint-reconciler-type": "none",
            "advertise-address": API_SERVICE_ADDRESS,
            "allow-privileged": "true",
            "profiling": "false",
        }

    def _controller_options(self) -> dict[str, str]:
        return {
            **self._component_options(),
            "root-ca-file": str(self._certificates.ca),
            "service-account-private-key-file": str(self._certificates.tokens_key),
            "node-monitor-period": "2s",
            "node-monitor-grace-period": "20s",
        }

    def _scheduler_options(self) -> dict[str, str]:
        return self._component_options()

    def _component_options(self) -> dict[str, str]:
        """No ports of their own, and no election: there is one of each."""
        return {"kubeconfig": str(self.kubeconfig), "leader-elect": "false", "port": "0", "secure-port": "0"}


def _spawn(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """NOTE: `setpriv` has the kernel end them with us, also when we are killed."""
    if setpriv := shutil.which("setpriv"):
        command = [setpriv, "--pdeathsig", "TERM", *command]
    return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)


@contextlib.contextmanager
def running_control_plane(bin_dir: Path | None = None) -> Iterator[ControlPlane]:
    """A control plane of its own for the time of the block.

    Args:
        bin_dir: where the four executables are; None = `default_folder()`.

    Raises:
        RuntimeError: an executable is missing, or one did not start; the message says what to do or shows its log.
    """
    bin_dir = bin_dir or default_folder()
    if missing := missing_binaries(bin_dir):
        raise RuntimeError(
            f"no {', '.join(missing)} in {bin_dir}; run python -m tools.kubernetes.build or name a folder by {VARIABLE}"
        )
    with tempfile.TemporaryDirectory(prefix="tandem-control-plane-", ignore_cleanup_errors=True) as folder:
        plane = ControlPlane(bin_dir, Path(folder))
        try:
            plane.start()
            yield plane
        finally:
            plane.stop()
