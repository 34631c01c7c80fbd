"""Routed experts by Triton in interpreter mode on CPU: floats and codes, against float64 arithmetic."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.architecture.feed_forward import Clamp
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.cuda.experts import experts_refusal
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.ops import Experts, ExpertWeights, Matrix, Numbers
from tests.contract import test_coded_experts as coded
from tests.contract import test_expert_kernels as floats
from tests.helpers.numbers import normal
from tests.helpers.triton_interpreter import products

pytest.importorskip("triton", reason="triton is not installed")

CLAMP = Clamp(alpha=1.702, limit=1.5)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture
def kernels() -> Iterator[TritonKernels]:
    with products(ordered=True):
        yield TritonKernels()


def compiled(kernels: TritonKernels, experts: list[ExpertWeights], clamp: Clamp | None = None) -> Experts:
    call = kernels.experts("silu", clamp, experts)
    assert call is not None, experts_refusal(experts)
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [None, CLAMP, floats.PLAIN_CLAMP], ids=["silu", "clamped", "clamped silu"])
def test_experts_of_floats_match_float64(kernels: TritonKernels, dtype: torch.dtype, clamp: Clamp | None) -> None:
    """More pairs of one expert than a tile has; sizes that fill no tile."""
    num_tokens, hidden, ffn, top_k = 20, 72, 33, 2
    experts = floats.random_experts(5, hidden, ffn, dtype, biases=clamp is not None)
    x, (weights, chosen) = normal(0, num_tokens, hidden, dtype=dtype), floats.random_choice(num_tokens, 4, top_k)
    chosen[:, 0], chosen[:, 1] = 3, chosen[:, 1] % 3
    outputs = torch.stack([floats.expert64(x.double(), e, "silu", clamp, dtype) for e in experts], 1)
    picked = outputs.gather(1, chosen.unsqueeze(2).expand(-1, -1, hidden)) * weights.double().unsqueeze(2)
    result = compiled(kernels, experts, clamp)(x, weights, chosen)
    assert result.dtype == torch.float32
    assert ((result.double() - picked.sum(1)).abs() <= TOLERANCE[dtype] * (1 + picked.abs().sum(1))).all()


@pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)
def test_experts_of_codes_match_float64(kernels: TritonKernels, kind: CodeKind) -> None:
    dtype, num_tokens, hidden, ffn, top_k = torch.bfloat16, 4, 64, 32, 2
    experts = [
        replace(expert, gate=without_order(expert.gate), up=without_order(expert.up), down=without_order(expert.down))
        for expert in coded.random_experts(kind, hidden, ffn, 32, dtype=dtype, has_more=True)
    ]
    x, (weights, chosen) = normal(0, num_tokens, hidden, dtype=dtype), coded.random_choice(num_tokens, top_k)
    outputs = torch.stack([coded.expert64(x.double(), expert, CLAMP, dtype) for expert in experts], 1)
    picked = outputs.gather(1, chosen.unsqueeze(2).expand(-1, -1, hidden)) * weights.double().unsqueeze(2)
    result = compiled(kernels, experts, CLAMP)(x, weights, chosen)
    bound = TOLERANCE[dtype] * (1 + picked.abs().sum(1) + picked.abs().amax())
    assert ((result.double() - picked.sum(1)).abs() <= bound).all()


def without_order(matrix: Numbers) -> CodedMatrix:
    assert isinstance(matrix, CodedMatrix)
    return replace(matrix, permutation=None)


def test_a_token_has_the_same_bits_alone(kernels: TritonKernels) -> None:
    """Beside so many others that a tile has 64 pairs, and alone in one of 16."""
    num_tokens, hidden = 70, 40
    call = compiled(kernels, floats.random_experts(2, hidden, 16, torch.bfloat16, biases=True))
    x, weights = normal(0, num_tokens, hidden, dtype=torch.bfloat16), normal(1, num_tokens, 2, dtype=torch.float32)
    chosen = torch.tensor([[0, 1], [1, 0]]).repeat(35, 1)
    together = call(x, weights, chosen, out_dtype=torch.bfloat16)
    for first, last in ((0, 1), (33, 36)):
        part = call(x[first:last], weights[first:last], chosen[first:last], out_dtype=torch.bfloat16)
        assert torch.equal(part, together[first:last])


def test_an_expert_that_is_not_hit_is_not_read(kernels: TritonKernels) -> None:
    experts = floats.random_experts(4, 32, 32, torch.float32, biases=False)
    for number in (0, 2):
        gate = experts[number].gate
        assert isinstance(gate, Matrix)
        gate.tensor.fill_(math.nan)
    out = compiled(kernels, experts)(
        normal(0, 5, 32, dtype=torch.float32), torch.ones(5, 2), torch.tensor([[1, 3]] * 5)
    )
    assert out.isfinite().all()
    assert compiled(kernels, experts)(torch.empty(0, 32), torch.empty(0, 2), torch.empty(0, 2).long()).shape == (0, 32)


def test_refusals_name_the_reason(kernels: TritonKernels) -> None:
    small, large = (floats.random_experts(1, 32, ffn, torch.float32, biases=False)[0] for ffn in (16, 32))
    double = floats.random_experts(1, 32, 16, torch.float64, biases=False)
    ordered = coded.random_experts(CodeKind.INT8, 32, 16, 16, dtype=torch.float32, has_more=True)
    shifted = Matrix(torch.zeros(16 * 32 + 1)[1:].view(16, 32))
    for experts, reason in (
        ([small, large], "experts are not alike"),
        (double, "experts of torch.float64"),
        ([replace(small, gate=large.gate)], "gate and up of an expert are not alike"),
        ([replace(small, gate_bias=torch.zeros(16))], "gate and up of an expert have different biases"),
        (ordered, "each expert has inputs in an order of its own"),
        ([replace(small, gate=shifted, up=shifted)], "an expert's tensors do not begin at 16 bytes each"),
        ([], "there are no experts"),
    ):
        assert experts_refusal(experts) == reason
        assert kernels.experts("silu", None, experts) is None
