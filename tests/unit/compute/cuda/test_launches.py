"""Models served with the Triton kernels: how many kernels a layer launches, and the logits of interpreted ones.

A GPU step of one request is as long as its launches, so what is fused must stay fused. Views launch nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.compute.attention import Backends
from tandem.compute.cuda import triton_rows
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.ops import Kernels
from tandem.compute.torch.attention import ReferenceBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.loader import load_model
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, MORE_BUILDERS
from tests.helpers.stepping import REFERENCE, Stepper
from tests.helpers.triton_interpreter import products

SAVERS = BUILDERS | MORE_BUILDERS | EXPERT_BUILDERS
NO_KERNEL = (
    *("view", "_unsafe_view", "as_strided", "slice", "select", "split", "unbind", "expand", "squeeze", "unsqueeze"),
    *("transpose", "permute", "t", "detach", "alias", "empty", "new_empty", "empty_like"),
)
MOST_LAUNCHES = {"llama": 12, "qwen2": 12, "qwen3": 12, "gemma3": 14}
"""Of a layer: q, k, v, o, gate, up and down; two or four norms; the rotation, the gate, and attention once."""


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of PyTorch that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class OneLaunch(ReferenceBackend):
    """Attention that answers with the queries."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def attend(self, queries: torch.Tensor, *args: Any) -> torch.Tensor:
        self._names.append("attend")
        return queries


def stepper(path: Path, kernels: Kernels, backends: Backends = REFERENCE) -> Stepper:
    model = load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=kernels)
    return Stepper(model.decoder, backends, num_tokens=32, block_size=16)


def launches(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a step of one token."""
    counted = Counted()

    class Launched:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: counted.names.append(self._name)

    for name in ("norm_kernel", "gated_kernel", "rope_kernel"):
        monkeypatch.setattr(triton_rows, name, Launched(name))
    attention: Mapping[Any, Any] = {**REFERENCE, next(iter(REFERENCE)): OneLaunch(counted.names)}
    step = stepper(path, TritonKernels(), attention)
    with counted:
        step.step([7])
    return counted.names


@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_layers_launch_few_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of two depths is that of layers alone."""
    pytest.importorskip("triton", reason="triton is not installed")
    counts = []
    for depth in (6, 12):
        kinds = {"layer_types": ["full_attention"] * depth} if name == "gemma3" else {}
        path = SAVERS[name](tmp_path / str(depth), num_hidden_layers=depth, **kinds)
        counts.append(launches(path, monkeypatch))
    assert (len(counts[1]) - len(counts[0])) / 6 <= MOST_LAUNCHES[name], counts[1][: 3 * MOST_LAUNCHES[name]]


@pytest.fixture
def interpreted() -> Iterator[None]:
    pytest.importorskip("triton", reason="triton is not installed")
    with products():
        yield


@pytest.mark.parametrize(
    "name",
    ["gemma3", *(pytest.param(each, marks=pytest.mark.slow) for each in sorted(SAVERS) if each != "gemma3")],
)
@pytest.mark.usefixtures("interpreted")
def test_logits_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    """Of a prompt and a token after it, in float32."""
    path = SAVERS[name](tmp_path)
    found, wanted = stepper(path, TritonKernels()), stepper(path, TorchKernels())
    for part in ([9, 8, 7, 6, 5], [4]):
        torch.testing.assert_close(found.step(part), wanted.step(part), rtol=2e-4, atol=2e-4)
