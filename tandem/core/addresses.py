"""Properties of the hosts in addresses: whether other machines reach them, and whether a resolver takes their names."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`, an IP address or a name."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() in ("localhost", "ip6-localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_host(host: str) -> None:
    """Raises ValueError for a name with an empty or too long label, as `redis..svc`; others may or may not resolve.

    NOTE: Python's resolver raises a UnicodeError for them, which nobody expects among network errors.
    """
    host.encode("idna")
