"""Addresses that only this machine can reach."""

import pytest

from tandem.core.addresses import is_loopback


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "LOCALHOST", "ip6-localhost"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1", "localhost.example"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
