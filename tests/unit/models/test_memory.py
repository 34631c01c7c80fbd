"""Loading holds little more than the parameters, measured in real processes on a checkpoint of about 200 MB."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.models.loader import load_model
from tests.helpers import checkpoints
from tests.helpers.coded_sizes import KINDS, LARGE, SMALL, loading, save_codes
from tests.helpers.gguf_files import write_gguf
from tests.helpers.native_kernels import load_or_skip

PEAK_RATIO = 1.15
SCRIPT = """
import sys, torch
from tandem.models.loader import load_model
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.parameters import tensors_of

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
tensors = tensors_of(model.decoder).values()
sums = sum(tensor.view(torch.uint8)[..., ::4096 // tensor.element_size()].sum().item() for tensor in tensors)
weights = sum(tensor.nbytes for tensor in tensors)
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


WORK_BYTES = {True: 8e6, False: 64e6}  # on one matrix, by the compiled kernels and by PyTorch's


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_native"),
    [*((name, True) for name in KINDS), ("gptq", False), ("compressed int4 groups", False)],
)
def test_peak_of_loading_codes(name: str, is_native: bool, tmp_path: Path) -> None:
    """Beside the share there is work on one matrix, however many weights there are.

    Without the compiled kernels codes may be those of the file, which is mapped more than once: the kernel counts pages
    of each mapping.
    """
    if is_native:
        load_or_skip()
    small, large = save_codes(tmp_path / "small", name, SMALL), save_codes(tmp_path / "large", name, LARGE)
    weights, growth = loading(small, large, is_native=is_native)
    assert weights > 110e6
    assert 0.9 * weights < growth <= PEAK_RATIO * weights + WORK_BYTES[is_native]


@pytest.mark.parametrize("name", KINDS)
def test_codes_in_an_order_of_their_own_keep_no_file_mapped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mapping that a tensor keeps would count as memory, beside the codes that were made of it."""
    kernels = load_or_skip()
    monkeypatch.setattr("tandem.models.checkpoint._RESIDENT_BYTES", 1)  # NOTE: mapped anew for every tensor
    path = save_codes(tmp_path, name, SMALL)
    model = load_model(str(path), device=torch.device("cpu"), kernels=kernels)
    mappings = Path("/proc/self/maps").read_text().count(str(path / "model.safetensors"))
    others = [weight for weight in model.decoder.parameters.weights.values() if not hasattr(weight, "coded")]
    assert 1 <= mappings <= 2 + len(others)  # NOTE: norms are views of the file, where it was mapped first


GGUF_SCRIPT = """
import sys, torch
from dataclasses import fields
from pathlib import Path
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.native.build import load_library
from tandem.models.gguf.convert import converted
from tandem.models.loader import load_model

def peak_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def load(path):
    made = converted(Path(path), Path(sys.argv[3]))
    model = load_model(str(made), device=torch.device("cpu"), kernels=kernels, packed_dir=Path(sys.argv[3]))
    owners = [getattr(weight, "coded", weight) for weight in model.decoder.parameters.weights.values()]
    values = [getattr(owner, field.name) for owner in owners for field in fields(owner)]
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}.values()
    sums = sum(tensor.view(torch.uint8)[..., :: 4096 // tensor.element_size()].sum().item() for tensor in tensors)
    return sum(tensor.nbytes for tensor in tensors)

kernels = NativeKernels(load_library())
load(sys.argv[1])
before = peak_bytes()
print(load(sys.argv[2]), peak_bytes() - before, "sympy" in sys.modules)
"""


def _load_gguf(tmp_path: Path, large: Path, type_name: str) -> tuple[int, int]:
    """(bytes of the weights, growth of the peak while a file is converted, packed, mapped, and every page is read)."""
    load_or_skip()
    small = write_gguf(checkpoints.save_tiny_llama(tmp_path / "tiny", hidden_size=64), tmp_path / "small.gguf")
    file = write_gguf(large, tmp_path / "large.gguf", type_name=type_name)
    command = [sys.executable, "-c", GGUF_SCRIPT, str(small), str(file), str(tmp_path / "cache")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weights, growth, has_sympy = output.split()
    assert has_sympy == "False", "40 MiB and a second of every start"
    return int(weights), int(growth)


def test_loading_a_gguf_file_imports_no_compiler(tmp_path: Path) -> None:
    """PyTorch's `empty_like` of a tensor on the meta device imported SymPy."""
    sizes: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    _load_gguf(tmp_path, checkpoints.save_tiny_llama(tmp_path / "plain", hidden_size=64, **sizes), "Q8_0")


@pytest.mark.slow
def test_peak_of_converting_and_loading_a_gguf_file(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    large = checkpoints.save_tiny_llama(tmp_path / "large", **sizes)
    weights, growth = _load_gguf(tmp_path, large, "Q8_0")
    assert weights > 75e6
    assert growth <= PEAK_RATIO * weights
