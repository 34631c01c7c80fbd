"""Addresses that a worker tells others."""

import socket

import psutil
import pytest
from pydantic import ValidationError

from tandem.core.errors import ConfigurationError
from tandem.worker.settings import DecodeSettings, PrefillSettings, first_address


def settings_of(**settings: str) -> DecodeSettings:
    return DecodeSettings.model_validate({"model": "m", **settings})


def has_network() -> bool:
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return any(
        entry.family == socket.AF_INET and not entry.address.startswith(("127.", "169.254.")) for entry in entries
    )


def test_the_first_address_is_one_that_others_can_call() -> None:
    assert first_address(["127.0.0.1", "::1", "10.89.0.7", "192.0.2.2"]) == "10.89.0.7"
    assert first_address(["fd00::2", "10.89.0.7"]) == "10.89.0.7"
    assert first_address(["::1", "fe80::fc:ff%eth0", "fd00::2"]) == "fd00::2"
    assert first_address(["127.0.0.1", "169.254.1.1", "0.0.0.0", "fe80::1%eth0"]) is None
    assert first_address([]) is None


@pytest.mark.skipif(not has_network(), reason="this machine has no address but loopback ones")
def test_auto_advertises_an_address_at_the_port_it_is_bound_to() -> None:
    settings = settings_of(bind="0.0.0.0:7900", advertise="auto")
    assert settings.advertise is not None
    host, _, port = settings.advertise.rpartition(":")
    assert port == "7900"
    assert host in {entry.address for entries in psutil.net_if_addrs().values() for entry in entries} - {"127.0.0.1"}
    assert settings.advertised("0.0.0.0:7900") == settings.advertise


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "127.0.0.1:0", "0.0.0.0:"])
def test_auto_needs_a_port_that_is_known_beforehand(bind: str) -> None:
    with pytest.raises(ValidationError, match=r"advertise[\s\S]*0\.0\.0\.0:7900"):
        settings_of(bind=bind, advertise="auto")


@pytest.mark.parametrize("advertise", ["decode-0", "decode-0:", ":7900", "decode-0:0", "decode-0:65536", ""])
def test_an_address_that_nobody_could_call_is_not_advertised(advertise: str) -> None:
    """The worker was ready, and never found: routers refused its announcements, which its log said once."""
    with pytest.raises(ValidationError, match="advertise"):
        settings_of(advertise=advertise)


def test_an_advertised_address_is_told_as_it_is_written() -> None:
    assert settings_of(advertise="decode-0:7900").advertised("0.0.0.0:7900") == "decode-0:7900"


def test_without_one_the_bound_address_is_told_unless_nobody_can_call_it() -> None:
    assert settings_of(bind="10.1.2.3:7900").advertised("10.1.2.3:7900") == "10.1.2.3:7900"
    with pytest.raises(ConfigurationError, match="advertise="):
        settings_of(bind="0.0.0.0:7900").advertised("0.0.0.0:7900")


@pytest.mark.parametrize("value", ["board", "board:", "board:x", ":-1"])
def test_a_core_board_without_a_slot_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="FILE:SLOT"):
        settings_of(core_board=value)


def test_a_core_board_that_is_not_there_is_named() -> None:
    assert settings_of().open_core_board() is None
    with pytest.raises(ConfigurationError, match="/nowhere/board"):
        settings_of(core_board="/nowhere/board:3").open_core_board()


@pytest.mark.parametrize(
    ("drafter", "at_prefill"),
    [("draft=small", "off"), ("eagle=head", "eagle=head"), ("mtp", "mtp"), ("auto", "off")],
)
def test_prefill_workers_load_only_heads_that_are_named(drafter: str, at_prefill: str) -> None:
    """They hand their state over; a draft model computes the prompt itself, where it drafts."""
    settings = {"model": "m", "speculate": drafter}
    assert PrefillSettings.model_validate(settings).engine_config().speculate == at_prefill
    assert DecodeSettings.model_validate(settings).engine_config().speculate == drafter
