"""Makes of a chart one that Kubernetes 1.20 takes: the same objects under the names that two APIs had then, without
fields that came later."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_OLD_NAMES = {
    re.compile(r"^(\s*apiVersion:\s*)policy/v1\s*$", re.MULTILINE): r"\1policy/v1beta1",
    re.compile(r"^(\s*apiVersion:\s*)autoscaling/v2\s*$", re.MULTILINE): r"\1autoscaling/v2beta2",
}
# NOTE: 1.20 knows no default for the protocol of a Service's port when objects are applied by the server.
_TARGET_PORT = re.compile(r"^([ ]*)targetPort:.*$", re.MULTILINE)
# NOTE: applying by the server refuses fields that it does not know.
_NEW_FIELD = re.compile(r"^[ ]*unhealthyPodEvictionPolicy:.*\n", re.MULTILINE)
_KUBE_VERSION = re.compile(r"^kubeVersion:.*\n", re.MULTILINE)


def chart_for_old_api(chart: Path, target: Path) -> Path:
    """Copy `chart` to `target` with its API versions made older and its demand for a newer Kubernetes left out."""
    shutil.copytree(chart, target)
    for file in sorted((target / "templates").rglob("*.yaml")):
        file.write_text(with_old_names(file.read_text()))
    description = target / "Chart.yaml"
    description.write_text(_KUBE_VERSION.sub("", description.read_text()))
    return target


def with_old_names(template: str) -> str:
    """A template with policy/v1 and autoscaling/v2 as 1.20 knows them."""
    for pattern, replacement in _OLD_NAMES.items():
        template = pattern.sub(replacement, template)
    return _TARGET_PORT.sub(r"\g<0>\n\1protocol: TCP", _NEW_FIELD.sub("", template))
