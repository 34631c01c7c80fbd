"""Memory for KV and GPUs that `tandem up` assigns to its workers."""

import random
from pathlib import Path

import pytest

from tandem.cli import up
from tandem.cli.up import UpCommand
from tandem.core import memory


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_KV_CACHE_GIB", raising=False)
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 << 30)
    monkeypatch.setattr(up, "count_gpus", lambda: 0)


def named_gib(**settings: object) -> list[float]:
    """Of each worker whose command names an amount."""
    topology = UpCommand.model_validate({"model": "m", **settings}).topology(Path("m"), random.Random(0))
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


def test_one_alone_decides_itself() -> None:
    assert not named_gib(prefill=0)


def placed(**settings: object) -> list[tuple[str, float]]:
    """Of each worker: its GPU and the share of that GPU's memory."""
    topology = UpCommand.model_validate({"model": "m", **settings}).topology(Path("m"), random.Random(0))
    flags = [spec.argv for spec in topology.specs() if "--gpu-memory-utilization" in spec.argv]
    return [
        (argv[argv.index("--device") + 1], float(argv[argv.index("--gpu-memory-utilization") + 1])) for argv in flags
    ]


@pytest.mark.parametrize(
    ("num_gpus", "settings", "expected"),
    [
        (1, {}, [("cuda:0", 0.45)] * 2),
        (2, {}, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        (8, {"prefill": 0}, [("cuda:0", 0.9)]),
        (2, {"prefill": 1, "decode": 2}, [("cuda:0", 0.45), ("cuda:1", 0.9), ("cuda:0", 0.45)]),
        (2, {"device": "cuda:1", "gpu_memory_utilization": 0.5}, [("cuda:1", 0.25)] * 2),
        (2, {"device": "cpu"}, []),
    ],
)
def test_workers_go_round_the_gpus_and_share_them(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, settings: dict[str, object], expected: list[tuple[str, float]]
) -> None:
    monkeypatch.setattr(up, "count_gpus", lambda: num_gpus)
    assert placed(**settings) == expected
    assert bool(named_gib(**settings)) == (not expected)


def test_a_gpu_that_is_not_there_is_left_to_the_worker_to_refuse() -> None:
    topology = UpCommand.model_validate({"model": "m", "device": "cuda"}).topology(Path("m"), random.Random(0))
    assert [spec.argv[spec.argv.index("--device") + 1] for spec in topology.specs() if "--device" in spec.argv] == [
        "cuda"
    ] * 2
