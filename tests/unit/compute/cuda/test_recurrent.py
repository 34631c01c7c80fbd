"""Triton's backend of recurrent layers on CPU: its refusals. What it computes has contracts of its own."""

import pytest
import torch

from tandem.architecture.state import RecurrentSpec
from tandem.compute.cuda.recurrent import TritonRecurrentBackend

pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RecurrentSpec(64, 3, "bfloat16", (8, 64, 512))
    assert TritonRecurrentBackend(CPU).refuses(spec, 16, 0.0) == "device cpu is not CUDA"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = TritonRecurrentBackend(torch.device("cuda"))
    assert "its matrices have more than 256 columns" in str(backend.refuses(spec, 16, 0.0))
    assert backend.refuses(RecurrentSpec(64, 3, "bfloat16"), 16, 0.0) is None
