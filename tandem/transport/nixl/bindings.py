"""Finds and loads NIXL's native bindings, or gives the reason why not. The only module that sets NIXL's environment.

The bindings are used without NIXL's Python wrapper, which sets the progress thread's delay to 0, so that every idle
agent burns most of a core. What we call of them is checked against exactly the versions named here.
"""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tandem.core.errors import ConfigurationError

SUPPORTED_VERSIONS = ("1.5.1",)
_WHEELS = (("nixl_cu13", "nixl-cu13"), ("nixl_cu12", "nixl-cu12"))

INFINIBAND = Path("/sys/class/infiniband")

# Without tcp UCX opens no port, which would take writes from everybody. Any user of our group could write into the
# segments of sysv. posix has what NIXL wants of tcp, noticing that a peer died, once its error handling is on.
ENVIRONMENT_DEFAULTS = {
    "UCX_TLS": "^tcp,sysv",
    "UCX_POSIX_ERROR_HANDLING": "y",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "UCX_ERROR_SIGNALS": "",  # a crash is Python's faulthandler's to report
    "UCX_TCP_USER_TIMEOUT": "5s",
    "UCX_TCP_KEEPIDLE": "3s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
}


def unavailable_reason() -> str | None:
    """Returns the reason why `load_bindings` would raise here, or None. Loads nothing."""
    for module, wheel in _WHEELS:
        if importlib.util.find_spec(module) is not None:
            version = importlib.metadata.version(wheel)
            if version in SUPPORTED_VERSIONS:
                return None
            return f"{wheel} {version} is installed; this code is verified against {', '.join(SUPPORTED_VERSIONS)} only"
    return f"no NIXL wheel is installed; pip install nixl-cu13=={SUPPORTED_VERSIONS[-1]}"


def rdma_ports(infiniband: Path = INFINIBAND) -> list[str]:
    """Returns this host's RDMA ports in UCX's notation, such as "mlx5_0:1"."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in infiniband.glob("*/ports/*"))


def environment_defaults(ports: list[str]) -> Mapping[str, str]:
    """Returns environment defaults by which UCX uses only these RDMA ports, or only loopback if there are none."""
    return ENVIRONMENT_DEFAULTS | {"UCX_NET_DEVICES": ",".join(ports) or "lo"}


def set_environment_defaults() -> None:
    """Set the variables that NIXL and UCX read on loading and for each agent, unless they are set already.

    NOTE: UCX's settings are lists, which NIXL's own options cannot carry: those end at a comma.
    """
    for name, value in environment_defaults(rdma_ports()).items():
        os.environ.setdefault(name, value)


def load_bindings() -> ModuleType:
    """Loads the native module.

    Raises:
        ConfigurationError: no module of a supported version can be loaded here.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise ConfigurationError(reason)
    set_environment_defaults()
    module = next(module for module, _ in _WHEELS if importlib.util.find_spec(module) is not None)
    try:
        return importlib.import_module(f"{module}._bindings")
    except ImportError as error:
        raise ConfigurationError(f"NIXL is installed but does not load: {error}") from error
