"""Builds the container images without a registry and runs them on a bridge network, with Debian's own tools.

`ensure_tools` installs buildah, podman and runc where it may; `build_images` makes the images; `Network` and
`Container` run them. Nothing here is shipped: it serves `make e2e-images` and the Kubernetes harness.
"""

from tools.images.build import Images, build_images
from tools.images.command import CommandError, run
from tools.images.container import Container, ContainerSpec, ContainerState
from tools.images.host import ensure_tools, missing_tools
from tools.images.network import Network

__all__ = [
    "CommandError",
    "Container",
    "ContainerSpec",
    "ContainerState",
    "Images",
    "Network",
    "build_images",
    "ensure_tools",
    "missing_tools",
    "run",
]
