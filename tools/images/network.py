"""A bridge network of its own whose containers find each other by name. Removed with everything on it at the end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tools.images.command import CommandError, run
from tools.images.host import podman


class Network:
    """A podman bridge network with name DNS. `Network.running` makes one for a while."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def create(name: str, subnet: str | None = None) -> "Network":
        """Make it; one of that name left over by an earlier run is removed first, with its containers.

        Raises:
            CommandError: podman could not; the message ends with its words.
        """
        network = Network(name)
        network.remove()
        podman("network", "create", *(("--subnet", subnet) if subnet else ()), name)
        return network

    @staticmethod
    @contextlib.contextmanager
    def running(name: str, subnet: str | None = None) -> Iterator["Network"]:
        """The network for the time of the block."""
        network = Network.create(name, subnet)
        try:
            yield network
        finally:
            network.remove()

    def connect(self, container: str, *, ip: str | None = None, aliases: tuple[str, ...] = ()) -> None:
        """Plug a container in, or in again."""
        flags = [flag for alias in aliases for flag in ("--alias", alias)]
        podman("network", "connect", *(("--ip", ip) if ip else ()), *flags, self.name, container)

    def disconnect(self, container: str) -> None:
        """Pull its plug: the container runs on, reaches nobody and is reached by nobody."""
        podman("network", "disconnect", self.name, container)

    def steady(self) -> None:
        """Give the bridge the hardware address that it has, for good. To be called when a container has been added.

        NOTE: left alone it has the lowest one of its ports, so the end of one container may change it, and then what
        the others send to this machine is lost for up to a minute, until they ask for the address again.
        """
        bridge = podman("network", "inspect", "--format", "{{.NetworkInterface}}", self.name)
        address = (Path("/sys/class/net") / bridge / "address").read_text().strip()
        run(["ip", "link", "set", "dev", bridge, "address", address])

    def remove(self) -> None:
        """Remove it and every container on it; nothing happens when there is none."""
        with contextlib.suppress(CommandError):
            podman("network", "rm", "--force", "--time", "0", self.name)
