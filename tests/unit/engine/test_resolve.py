"""The device of a worker, and its share of a GPU's memory for KV."""

import pytest
import torch

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.engine.resolve import default_kv_cache_bytes, resolve_device

GIB = 1 << 30
GPU = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("free_gib", "weights_gib", "utilization", "kv_gib"),
    [
        (62, 16, 0.9, 54),  # alone: 2 GiB are its context's
        (63, 16, 0.45, 20),  # of two that start together
        (26, 16, 0.45, 18),  # the other has taken its part already
        (30, 16, 0.9, 22),  # strangers have a part
        (64, 16, 1.0, 64),
        (5, 16, 0.9, 0),
        (63, 40, 0.45, 0),  # its share does not hold the weights
    ],
)
def test_kv_takes_what_a_workers_share_of_a_gpu_leaves(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, weights_gib: int, utilization: float, kv_gib: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: weights_gib * GIB)
    assert default_kv_cache_bytes(GPU, utilization) == pytest.approx(kv_gib * GIB, abs=10)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigurationError, match="gpu_memory_utilization"):
        EngineConfig("m", gpu_memory_utilization=share)


@pytest.mark.parametrize("name", ["cuda:", "cuda:01", "cuda:\u0663", "cuda:1:0", "cpu:0", "gpu"])
def test_a_device_of_no_form_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Names that PyTorch cannot read, too."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [str(resolve_device(each)) for each in ("cpu", "cuda", "cuda:7")] == ["cpu", "cuda", "cuda:7"]
    with pytest.raises(ConfigurationError, match="use auto, cpu, cuda or cuda:N"):
        resolve_device(name)
