"""Questions about addresses that a process listens on. Pure."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`, an IP address or a name."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
