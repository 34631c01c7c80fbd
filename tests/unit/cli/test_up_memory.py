"""How much memory for KV `tandem up` tells its workers to take."""

import random
from pathlib import Path

import pytest

from tandem.cli import up
from tandem.cli.up import Up
from tandem.core import memory


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_KV_CACHE_GIB", raising=False)
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 << 30)
    monkeypatch.setattr(up, "_GPU_DEVICES", ())


def named_gib(**settings: object) -> list[float]:
    """Of each worker whose command names an amount."""
    topology = Up.model_validate({"model": "m", **settings}).topology(Path("m"), random.Random(0))
    flags = [spec.argv for spec in topology.specs()]
    return [float(argv[argv.index("--kv-cache-gib") + 1]) for argv in flags if "--kv-cache-gib" in argv]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_workers_of_one_machine_share_what_one_would_take(device: str) -> None:
    assert named_gib(prefill=2, decode=2, device=device) == [0.5] * 4


def test_a_part_is_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    assert named_gib() == [1 / 1024] * 2


def test_an_amount_that_was_named_is_each_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_gib(kv_cache_gib=0.25) == [0.25] * 2
    monkeypatch.setenv("TANDEM_KV_CACHE_GIB", "0.75")
    assert named_gib() == [0.75] * 2


def test_one_alone_and_those_on_gpus_decide_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not named_gib(prefill=0)
    assert not named_gib(device="cuda")
    monkeypatch.setattr(up, "_GPU_DEVICES", (tmp_path,))
    assert not named_gib()
    assert named_gib(device="cpu")
