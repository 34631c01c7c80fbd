"""Triton's norms, gated products and rotary embedding in interpreter mode on CPU, beside PyTorch's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.architecture.feed_forward import Activation
from tandem.compute.cuda import rows
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.torch.kernels import TorchKernels
from tests.contract.test_attention_backends import normal
from tests.helpers.triton_interpreter import products

pytest.importorskip("triton", reason="triton is not installed")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OURS, PLAIN = TritonKernels(), TorchKernels()


@pytest.fixture(autouse=True)
def _products() -> Iterator[None]:
    with products():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Triton declines and leaves the result to PyTorch, so that what is compared is Triton's own."""
    asked: dict[str, Any] = {name: getattr(rows, name) for name in ("gated_product", "rms_norm", "rope")}

    def served(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = asked[name](*args, **kwargs)
            assert answer is not None, name
            assert answer is not False, name
            return answer

        return call

    for name in asked:
        monkeypatch.setattr(rows, name, served(name))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To one rounding of the dtype."""
    assert found.dtype == wanted.dtype
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [24, 1500])
def test_gated_product(dtype: torch.dtype, activation: Activation, size: int) -> None:
    """Of halves of one product's rows, with values past which exponents overflow."""
    both = normal(1, 5, 2 * size).to(dtype)
    both[0, :4] = torch.tensor([200.0, -200.0, 0.0, -100.0])
    gate, up = both[:, :size], both[:, size:]
    found = OURS.gated_product(gate, up, activation)
    assert found.isfinite().all()
    close(found, PLAIN.gated_product(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 128), (2, 3000)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], unit_offset: bool) -> None:
    x, residual, weight = normal(1, *shape).to(dtype), normal(2, *shape).to(dtype), normal(3, shape[-1]).to(dtype)
    close(
        OURS.rms_norm(x, weight, 1e-5, unit_offset=unit_offset),
        PLAIN.rms_norm(x, weight, 1e-5, unit_offset=unit_offset),
    )
    sums = residual.clone()
    found = OURS.rms_norm(x, weight, 1e-5, residual=sums, unit_offset=unit_offset)
    close(found, PLAIN.rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit_offset))
    assert torch.equal(sums, residual), "the sum is rounded as PyTorch rounds it"


def test_rms_norm_of_a_weight_of_another_dtype() -> None:
    x, weight = normal(1, 4, 64).bfloat16(), normal(2, 64).float()
    close(OURS.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norms"),
    [(32, 32, "both"), (32, 16, "both"), (40, 24, "q"), (24, 24, "none"), (80, 40, "offset"), (16, 0, "both")],
)
def test_rope_and_write(dtype: torch.dtype, head_dim: int, rotary_dim: int, norms: str) -> None:
    """Q, K and V are slices of one product; a token has no slot, and what lies beside the slots stays."""
    merged = normal(1, 6, 8, head_dim).to(dtype)
    cos, sin = normal(2, 50, rotary_dim // 2).float(), normal(3, 50, rotary_dim // 2).float()
    positions = torch.tensor([0, 1, 2, 7, 7, 49])
    slots = torch.tensor([16, 17, 18, -1, 39, 5])
    weights = [(1 + normal(each, head_dim)).to(dtype) for each in (4, 5)]
    q_norm = None if norms == "none" else weights[0]
    k_norm = weights[1] if norms in ("both", "offset") else None
    found: list[list[torch.Tensor]] = []
    for kernels in (OURS, PLAIN):
        q, k, v = (merged.clone()[:, part] for part in (slice(4), slice(4, 6), slice(6, 8)))
        caches = normal(6, 2, 3, 2, 16, head_dim).to(dtype)
        caches[:, 0] = 0
        kernels.rope_and_write(
            q, k, v, cos, sin, positions, slots, caches[0], caches[1],
            q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, unit_offset=norms == "offset",
        )  # fmt: skip
        caches[:, 0] = torch.where(torch.arange(16)[:, None] == 5, caches[:, 0], 0)
        found.append([q, k, v, caches])
    for ours, plain in zip(*found, strict=True):
        close(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    q, weight = normal(1, 4, 3, 32).to(dtype), normal(2, 32).to(dtype)
    cos, sin, positions = normal(3, 9, 8).float(), normal(4, 9, 8).float(), torch.tensor([8, 0, 3, 3])
    for norm in (weight, None):
        found, wanted = q.clone(), q.clone()
        OURS.rotate(found, cos, sin, positions, norm=norm, norm_eps=1e-5)
        PLAIN.rotate(wanted, cos, sin, positions, norm=norm, norm_eps=1e-5)
        close(found, wanted)


def test_a_row_has_the_same_bits_alone() -> None:
    x, weight = normal(1, 7, 300).bfloat16(), normal(2, 300).bfloat16()
    assert torch.equal(OURS.rms_norm(x, weight, 1e-5)[4:5], OURS.rms_norm(x[4:5], weight, 1e-5))
    assert torch.equal(OURS.gated_product(x, x, "silu")[4:5], OURS.gated_product(x[4:5], x[4:5], "silu"))


def test_no_rows_are_no_launch() -> None:
    nothing = torch.empty(0, 16)
    assert OURS.rms_norm(nothing, torch.ones(16), 1e-5).shape == (0, 16)
    assert OURS.gated_product(nothing, nothing, "silu").shape == (0, 16)
    OURS.rotate(torch.empty(0, 2, 16), torch.ones(1, 8), torch.ones(1, 8), torch.empty(0, dtype=torch.int64))


def test_what_is_not_served_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    weight, turned = torch.ones(8), normal(1, 8, 4).float().t()
    assert turned.stride() == (1, 4)
    assert rows.rms_norm(turned, weight, 1e-5, None, False) is None
    assert torch.equal(OURS.rms_norm(turned, weight, 1e-5), PLAIN.rms_norm(turned, weight, 1e-5))
    assert rows.gated_product(turned, turned, "silu") is None
    assert torch.equal(OURS.gated_product(turned, turned, "silu"), PLAIN.gated_product(turned, turned, "silu"))
    q, table, positions = normal(2, 4, 8, 2).float().transpose(1, 2), torch.ones(4, 4), torch.arange(4)
    options: dict[str, Any] = {"q_norm": None, "k_norm": None, "norm_eps": 1e-5, "unit_offset": False}
    before = q.clone()
    assert not rows.rope(q, None, table, table, positions, **options)
    assert torch.equal(q, before)
    found, wanted = q.clone(memory_format=torch.preserve_format), q.clone(memory_format=torch.preserve_format)
    OURS.rotate(found, table, table, positions)
    PLAIN.rotate(wanted, table, table, positions)
    assert torch.equal(found, wanted)
