"""Operators' port and keys of `tandem up` where others than this machine reach it."""

import random
from pathlib import Path

import pytest

from tandem.cli.up import UpCommand
from tandem.core.errors import ConfigurationError
from tandem.process.topology import Topology


def topology(tmp_path: Path, **settings: object) -> Topology:
    up = UpCommand.model_validate({"model": str(tmp_path), "cpus": "any", "device": "cpu", **settings})
    return up.topology(tmp_path, random.Random(1))


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNTS", "ADMIN_BIND", "ALLOW_ANONYMOUS"):
        monkeypatch.delenv(f"TANDEM_{name}", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5"])
def test_beyond_loopback_keys_or_a_word_are_needed(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"TANDEM_ACCOUNTS.*--allow-anonymous"):
        topology(tmp_path, host=host)
    gateway = topology(tmp_path, host=host, allow_anonymous=True).specs()[-1]
    assert "--allow-anonymous" in gateway.argv
    assert "TANDEM_ALLOW_ANONYMOUS" in gateway.without_env
    monkeypatch.setenv("TANDEM_ACCOUNTS", "accounts.db")
    gateway = topology(tmp_path, host=host).specs()[-1]
    assert "--allow-anonymous" not in gateway.argv


def test_operators_get_a_port_of_loopback_where_others_reach_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert topology(tmp_path).admin_binds == ()
    made = topology(tmp_path, host="0.0.0.0", allow_anonymous=True, port=8000)
    (bind,) = made.admin_binds
    assert bind.startswith("127.0.0.1:")
    assert made.admin_url() == made.metrics_url("gateway") == f"http://{bind}" != made.gateway_url()
    gateway = made.specs()[-1]
    assert gateway.argv[gateway.argv.index("--admin-bind") + 1] == bind
    assert gateway.ready_url == "http://127.0.0.1:8000/ready"
    monkeypatch.setenv("TANDEM_ACCOUNTS", "accounts.db")
    assert len(topology(tmp_path).admin_binds) == 1


def test_their_address_can_be_given(tmp_path: Path) -> None:
    assert topology(tmp_path, admin_bind="0.0.0.0:9000").admin_url() == "http://127.0.0.1:9000"
    assert topology(tmp_path, admin_bind="[::]:9000").admin_url() == "http://[::1]:9000"
    (bind,) = topology(tmp_path, admin_bind="127.0.0.1:0").admin_binds
    assert int(bind.rpartition(":")[2]) > 0
    with pytest.raises(ValueError, match="it is not host:port"):
        topology(tmp_path, admin_bind="9000")
