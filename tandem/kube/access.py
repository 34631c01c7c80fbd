"""Address and credentials of the API server: from a pod's service account or a kubeconfig. Opens no connection."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.core.errors import ConfigurationError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address and credentials: either `url` and its credentials, or `kubeconfig`, paths as in KUBECONFIG.

    Args:
        token_file: read again for every call, since Kubernetes replaces the token about every hour.
        ca_file: CA certificate that an https server must be signed by; None = the system's.
        namespace: of this process; "" = the kubeconfig's, else "default".
    """

    url: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    ca_file: Path | None = None
    kubeconfig: str = ""
    namespace: str = ""


def find_access(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> Access:
    """A pod's service account, else the files that KUBECONFIG names, else ~/.kube/config.

    Raises:
        ConfigurationError: there is none of them.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if host and port:
        return _in_cluster(host, port, service_account)
    kubeconfig = environ.get("KUBECONFIG") or str(Path(environ.get("HOME", "")) / ".kube" / "config")
    if any(Path(path).is_file() for path in kubeconfig.split(os.pathsep)):
        return Access(kubeconfig=kubeconfig)
    raise ConfigurationError(
        f"no Kubernetes API server is known: this is no pod (KUBERNETES_SERVICE_HOST is not set) and {kubeconfig} is"
        " no file; name a kubeconfig by KUBECONFIG, or choose another --discovery"
    )


def _in_cluster(host: str, port: str, folder: Path) -> Access:
    token, namespace = folder / "token", folder / "namespace"
    if not token.is_file():
        raise ConfigurationError(
            f"the pod's service account has no token at {token}; set automountServiceAccountToken: true for this pod"
        )
    return Access(
        url=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        token_file=token,
        ca_file=folder / "ca.crt",
        namespace=namespace.read_text().strip() if namespace.is_file() else "",
    )
