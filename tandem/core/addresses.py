"""Tells whether an address on which a process listens can be reached from other machines."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`, an IP address or a name."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() in ("localhost", "ip6-localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
