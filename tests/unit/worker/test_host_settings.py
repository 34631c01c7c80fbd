"""Settings of ranks on several hosts that are refused before anybody waits for a host."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.core.errors import ConfigurationError
from tandem.worker.host_settings import RankHostSettings
from tandem.worker.host_tier_check import check_host_tier
from tandem.worker.settings import DecodeSettings, PrefillSettings

TWO: dict[str, Any] = {"tp": 2, "hosts": 2, "ranks_bind": "127.0.0.1:7903"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp": 2, "hosts": 2}, "hosts=2 needs ranks_bind, where the others join"),
        (TWO | {"tp": 1}, "tp=1 is not divided evenly by hosts=2"),
        (TWO | {"hosts": 3, "tp": 8}, "tp=8 is not divided evenly by hosts=3"),
        (TWO | {"pp": 3}, "pp=3 with hosts=2: each host has whole stages of layers; give as many stages as hosts"),
        (TWO | {"cp": 2}, "cp=2 with hosts=2: contexts of a stage share one memory; give cp=1, hosts=1, or pp=2"),
        ({"cp": 2}, "cp=2 for a decode worker: .* give cp to prefill workers, and tp to this one"),
        (TWO | {"ranks_bind": "127.0.0.1"}, "it is not host:port"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DecodeSettings(model="m", **values)


def test_hosts_may_have_one_rank_of_a_stage_each() -> None:
    assert DecodeSettings(model="m", **TWO | {"tp": 1, "pp": 4}).num_ranks == 4


def test_a_prefill_worker_has_contexts_of_ranks() -> None:
    sizes: tuple[dict[str, Any], ...] = ({"cp": 3}, {"cp": 2, "tp": 4})
    assert [PrefillSettings(model="m", **size).num_ranks for size in sizes] == [3, 8]


def test_a_host_tier_over_several_hosts_is_refused() -> None:
    check_host_tier(DecodeSettings(model="m", **TWO))
    check_host_tier(PrefillSettings(model="m", **TWO))
    with pytest.raises(ConfigurationError, match=r"host_kv_gib=1 with hosts=2: .* leave host_kv_gib at 0"):
        check_host_tier(DecodeSettings(model="m", host_kv_gib=1, **TWO))


def test_plain_text_beyond_this_machine_is_refused() -> None:
    """At the host's end; at the worker's, `--ranks-bind` is among the addresses that need TLS."""
    values: dict[str, Any] = {"leader": "10.0.0.1:7903", "cluster_secret": "shared by all of the tests"}
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1:7903 is beyond this machine, where processes need TLS"):
        RankHostSettings(**values).own_credentials()
    assert RankHostSettings(**values, insecure=True).own_credentials().tls is None
    here = values | {"leader": "127.0.0.1:7903", "kv_bind": "10.0.0.2:7902"}
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.2:7902 is beyond this machine"):
        RankHostSettings(**here).own_credentials()
    assert DecodeSettings(model="m", **TWO).rank_addresses == ("127.0.0.1:7903",)


@pytest.mark.parametrize("host", ["10.0.0.3:7902", "ranks-1.ranks:7902", "[fd00::3]:7902", "", "[]"])
def test_an_advertised_host_has_no_port(host: str) -> None:
    """Regression: peers were told `10.0.0.3:7902:7902`, and reached nobody."""
    with pytest.raises(ValidationError, match=r"needs a host without a port, .* is that of kv_bind"):
        RankHostSettings(**_at(host))


@pytest.mark.parametrize(
    ("host", "advertised"),
    [("10.0.0.3", "10.0.0.3"), ("ranks-1.ranks", "ranks-1.ranks"), ("fd00::3", "fd00::3"), ("[fd00::3]", "fd00::3")],
)
def test_an_advertised_host_is_one_to_connect_to(host: str, advertised: str) -> None:
    assert RankHostSettings(**_at(host)).advertise_host == advertised


def _at(host: str) -> dict[str, Any]:
    return {"leader": "127.0.0.1:7903", "advertise_host": host}
