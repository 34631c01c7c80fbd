"""The compiled experts of a layer, of codes: against float64 arithmetic and against the kernels expert by expert."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tandem.architecture.feed_forward import Clamp
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import Experts, ExpertWeights, Matrix, Numbers
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.coded_matrices import random_coded
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import normal

NUM_EXPERTS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOSS = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
KINDS = pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


def random_experts(
    kind: CodeKind, hidden: int, ffn: int, group_size: int, *, dtype: torch.dtype, has_more: bool = False
) -> list[ExpertWeights]:
    """`has_more`: offsets, biases, and permutations that are each expert's own."""
    offsets = torch.float32 if has_more else None

    def matrix(seed: int, outputs: int, inputs: int, order: int) -> CodedMatrix:
        plain = random_coded(kind, (outputs, inputs), group_size, seed=seed, offsets=offsets, factor=inputs**-0.5)
        permutation = torch.randperm(inputs, generator=torch.Generator().manual_seed(order))
        return replace(plain, permutation=permutation) if has_more else plain

    def bias(seed: int, size: int) -> torch.Tensor | None:
        return normal(seed, size, dtype=dtype) if has_more else None

    return [
        ExpertWeights(
            matrix(i, ffn, hidden, i),
            matrix(i + 20, ffn, hidden, i),
            matrix(i + 40, hidden, ffn, i),
            *(bias(i, ffn), bias(i + 1, ffn), bias(i + 2, hidden)),
        )
        for i in range(NUM_EXPERTS)
    ]


def random_choice(num_tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(num_tokens))
    weights, chosen = scores.topk(top_k)
    return weights.contiguous(), chosen.contiguous()


def packed_expert(kernels: NativeKernels, expert: ExpertWeights) -> ExpertWeights:
    def pack(matrix: Numbers) -> CodedMatrix:
        assert isinstance(matrix, CodedMatrix)
        return kernels.pack_coded(matrix)

    return replace(expert, gate=pack(expert.gate), up=pack(expert.up), down=pack(expert.down))


def compiled(kernels: NativeKernels, experts: list[ExpertWeights], clamp: Clamp | None = None) -> Experts:
    found = kernels.experts("silu", clamp, experts)
    assert found is not None
    return found


def product(x: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ matrix.decode().double().T + (0.0 if bias is None else bias.double())


def expert64(x: torch.Tensor, expert: ExpertWeights, clamp: Clamp | None, dtype: torch.dtype) -> torch.Tensor:
    """With the inner row rounded to `dtype`, as it is between two products."""
    assert isinstance(expert.gate, CodedMatrix)
    assert isinstance(expert.up, CodedMatrix)
    assert isinstance(expert.down, CodedMatrix)
    gate, up = product(x, expert.gate, expert.gate_bias), product(x, expert.up, expert.up_bias)
    if clamp is None:
        inner = functional.silu(gate) * up
    else:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        inner = (up + 1) * gate * (clamp.alpha * gate).sigmoid()
    return product(inner.to(dtype).double(), expert.down, expert.down_bias)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_more", [False, True], ids=["plain", "offsets, biases and permutations"])
def test_experts_match_float64(kernels: NativeKernels, kind: CodeKind, dtype: torch.dtype, has_more: bool) -> None:
    clamp = Clamp(alpha=1.702, limit=1.5) if has_more else None
    for num_tokens, hidden, ffn, group_size, top_k in ((1, 32, 16, 16, 3), (9, 48, 33, 32, 2), (40, 264, 65, 128, 6)):
        experts = random_experts(kind, hidden, ffn, group_size, dtype=dtype, has_more=has_more)
        x, (weights, chosen) = normal(0, num_tokens, hidden, dtype=dtype), random_choice(num_tokens, top_k)
        outputs = torch.stack([expert64(x.double(), expert, clamp, dtype) for expert in experts], 1)
        picked = outputs.gather(1, chosen.unsqueeze(2).expand(-1, -1, hidden)) * weights.double().unsqueeze(2)
        result = compiled(kernels, experts, clamp)(x, weights, chosen)
        bound = LOSS[dtype] * (1 + picked.abs().sum(1) + picked.abs().amax())
        assert ((result.double() - picked.sum(1)).abs() <= bound).all()


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_more", [False, True], ids=["plain", "offsets, biases and permutations"])
def test_experts_have_the_bits_of_one_after_the_other(
    kernels: NativeKernels, kind: CodeKind, dtype: torch.dtype, has_more: bool
) -> None:
    hidden, ffn = 72, 40
    experts = random_experts(kind, hidden, ffn, 8 if has_more else 128, dtype=dtype, has_more=has_more)
    x, (weights, chosen) = normal(1, 30, hidden, dtype=dtype), random_choice(30, 3)
    expected = torch.zeros(30, hidden)
    for number, expert in enumerate(experts):
        rows, place = (chosen == number).nonzero(as_tuple=True)
        assert isinstance(expert.gate, CodedMatrix)
        assert isinstance(expert.up, CodedMatrix)
        assert isinstance(expert.down, CodedMatrix)
        inner = kernels.coded_gated_linear(x[rows], expert.gate, expert.up, "silu", expert.gate_bias, expert.up_bias)
        assert inner is not None
        y = kernels.coded_linear(inner, expert.down, expert.down_bias, out_dtype=torch.float32)
        expected.index_add_(0, rows, y * weights[rows, place].unsqueeze(1))
    packed = [packed_expert(kernels, expert) for expert in experts]
    for each in (experts, packed):
        call = compiled(kernels, each)
        assert torch.equal(call(x, weights, chosen), expected)
        assert torch.equal(call(x, weights, chosen, out_dtype=dtype), expected.to(dtype))
        for first, last in ((0, 1), (3, 5), (7, 30)):
            part = call(x[first:last], weights[first:last], chosen[first:last])
            assert torch.equal(part, expected[first:last])


def test_experts_that_differ_have_no_call(kernels: NativeKernels) -> None:
    def build(kind: CodeKind, group_size: int) -> ExpertWeights:
        return random_experts(kind, 64, 32, group_size, dtype=torch.float32)[0]

    plain = build(CodeKind.INT8, 32)
    floats = Matrix(torch.zeros(32, 64))
    assert kernels.experts("silu", None, [plain, build(CodeKind.INT8, 32)]) is not None
    assert kernels.experts("silu", None, [plain, build(CodeKind.E4M3, 32)]) is None
    assert kernels.experts("silu", None, [plain, build(CodeKind.INT8, 16)]) is None
    assert kernels.experts("silu", None, [replace(plain, up=build(CodeKind.TABLE4, 32).up)]) is None
    assert kernels.experts("silu", None, [replace(plain, gate=floats, up=floats)]) is None
    assert TorchKernels().experts("silu", None, [plain]) is None
