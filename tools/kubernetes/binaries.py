"""Finds the control plane's executables. Looks in one folder only and never searches the system."""

from __future__ import annotations

import os
from pathlib import Path

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
VARIABLE = "TANDEM_KUBE_BIN"


def default_folder() -> Path:
    """`TANDEM_KUBE_BIN`, or the cache folder that `python -m tools.kubernetes.build` fills."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache/tandem/kubernetes"


def missing_binaries(folder: Path) -> list[str]:
    """The executables that `folder` lacks."""
    return [name for name in BINARIES if not os.access(folder / name, os.X_OK)]
