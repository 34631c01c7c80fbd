"""Loading holds little more than the parameters, measured in real processes on a checkpoint of about 200 MB."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import checkpoints

PEAK_RATIO = 1.15
SCRIPT = """
import sys, torch
from tandem.models.loader import load_model
from tandem.compute.torch.kernels import TorchKernels

def peak_bytes():
    # Not ru_maxrss: a child inherits its parent's.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def load(path, dtype):
    return load_model(
        path, dtype=dtype, device=torch.device("cpu"), kernels=TorchKernels(), allow_pickle=True
    )

load(sys.argv[1], sys.argv[3])
before = peak_bytes()
model = load(sys.argv[2], sys.argv[3])
sums = sum(tensor.view(torch.uint8)[..., ::4096 // tensor.element_size()].sum().item()
           for tensor in model.decoder.parameters.values())
weights = sum(tensor.nbytes for tensor in model.decoder.parameters.values())
print(weights, peak_bytes() - before)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 100 million parameters in bfloat16, half of them in the embedding."""
    path = tmp_path_factory.mktemp("large")
    checkpoints.save_tiny_llama(
        path, dtype="bfloat16", vocab_size=24000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3
    )
    return path


def _measure(tiny: Path, path: Path, dtype: str) -> tuple[int, int]:
    """(bytes of the parameters, growth of the peak resident size while loading and reading every page of them)."""
    command = [sys.executable, "-c", SCRIPT, str(tiny), str(path), dtype]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weights, growth = map(int, output.split())
    return weights, growth


def _assert_peak(tiny: Path, path: Path, dtype: str) -> None:
    weights, growth = _measure(tiny, path, dtype)
    assert weights > 150e6
    assert 0.9 * weights < growth, "every page was read, so a lesser peak is a wrong measurement"
    assert growth <= PEAK_RATIO * weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_of_loading_safetensors(dtype: str, tiny: Path, large: Path) -> None:
    _assert_peak(tiny, large, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_of_loading_a_pytorch_file(dtype: str, tiny: Path, large: Path, tmp_path: Path) -> None:
    torch.save(checkpoints.read_tensors(large), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((large / "config.json").read_text())
    _assert_peak(tiny, tmp_path, dtype)


@pytest.mark.slow
def test_peak_of_narrowing(tiny: Path, large: Path, tmp_path: Path) -> None:
    wide = {name: tensor.float() for name, tensor in checkpoints.read_tensors(large).items()}
    save_file(wide, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((large / "config.json").read_text())
    _assert_peak(tiny, tmp_path, "bfloat16")
