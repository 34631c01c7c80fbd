"""The compiled experts of a layer and their choice, against float64 arithmetic and against the kernels one by one."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.architecture.feed_forward import Activation, Clamp, GatedSpec, RouterSpec, Score
from tandem.architecture.tensors import LinearSpec, TensorSpec
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import Experts, ExpertWeights, Matrix, Numbers
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.layers.experts import ExpertsInTurn
from tandem.models.layers.router import ExpertRouter
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import normal
from tests.helpers.parameters import dense_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLAMP = Clamp(alpha=1.702, limit=1.5)
PLAIN_CLAMP = Clamp(alpha=1.0, limit=0.7, shift=0.0)
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


def random_experts(count: int, hidden: int, ffn: int, dtype: torch.dtype, *, biases: bool) -> list[ExpertWeights]:
    """Matrices scaled so that outputs are about 1."""

    def bias(seed: int, size: int) -> torch.Tensor | None:
        return normal(seed, size, dtype=dtype) if biases else None

    def expert(seed: int) -> ExpertWeights:
        gate, up = ((normal(seed + i, ffn, hidden) / math.sqrt(hidden)).to(dtype) for i in range(2))
        down = (normal(seed + 2, hidden, ffn) / math.sqrt(ffn)).to(dtype)
        matrices = Matrix(gate), Matrix(up), Matrix(down)
        return ExpertWeights(*matrices, bias(seed + 3, ffn), bias(seed + 4, ffn), bias(seed + 5, hidden))

    return [expert(10 * number) for number in range(count)]


def random_choice(num_tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = normal(7, num_tokens, num_experts).argsort(1)[:, :top_k].contiguous()
    return normal(8, num_tokens, top_k), chosen


def compile_experts(
    kernels: NativeKernels, activation: Activation, clamp: Clamp | None, experts: list[ExpertWeights]
) -> Experts:
    """The call, which there must be."""
    compiled = kernels.experts(activation, clamp, experts)
    assert compiled is not None
    return compiled


def packed(kernels: NativeKernels, experts: list[ExpertWeights]) -> list[ExpertWeights]:
    def pack(matrix: Numbers) -> Matrix:
        assert isinstance(matrix, Matrix)
        return Matrix(kernels.pack(matrix.tensor), Order.STRIPS)

    return [ExpertWeights(pack(e.gate), pack(e.up), pack(e.down), e.gate_bias, e.up_bias, e.down_bias) for e in experts]


def expert64(
    x: torch.Tensor, expert: ExpertWeights, activation: Activation, clamp: Clamp | None, dtype: torch.dtype
) -> torch.Tensor:
    """With the inner row rounded to `dtype`, as it is between two products."""

    def product(row: torch.Tensor, weight: Numbers, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(weight, Matrix)
        return row @ weight.tensor.double().T + (0.0 if bias is None else bias.double())

    gate, up = product(x, expert.gate, expert.gate_bias), product(x, expert.up, expert.up_bias)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        inner = (up + clamp.shift) * gate * (clamp.alpha * gate).sigmoid()
    else:
        inner = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return product(inner.to(dtype).double(), expert.down, expert.down_bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("activation", "clamp"), [("silu", None), ("gelu_tanh", None), ("silu", CLAMP), ("silu", PLAIN_CLAMP)]
)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "ffn", "top_k"), [(1, 32, 16, 3), (9, 48, 33, 2), (70, 31, 20, 1), (40, 1030, 65, 8)]
)
def test_experts_match_float64(
    kernels: NativeKernels, dtype: torch.dtype, biases: bool, activation: Activation, clamp: Clamp | None,
    num_tokens: int, hidden: int, ffn: int, top_k: int,
) -> None:  # fmt: skip
    experts = random_experts(8, hidden, ffn, dtype, biases=biases)
    x, (weights, chosen) = normal(0, num_tokens, hidden, dtype=dtype), random_choice(num_tokens, 8, top_k)
    result = compile_experts(kernels, activation, clamp, experts)(x, weights, chosen)
    outputs = torch.stack([expert64(x.double(), e, activation, clamp, dtype) for e in experts], 1)
    picked = outputs.gather(1, chosen.unsqueeze(2).expand(-1, -1, hidden))
    expected = (picked * weights.double().unsqueeze(2)).sum(1)
    assert result.dtype == torch.float32
    # The inner row may be rounded to the other neighbour here and there: a few of `ffn` terms.
    bound = 8 * RELATIVE[dtype] * weights.abs().sum(1, keepdim=True).double() + 2e-5
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 500])
def test_one_call_has_the_bits_of_experts_in_turn(kernels: NativeKernels, dtype: torch.dtype, num_tokens: int) -> None:
    hidden, ffn = 96, 64
    experts = random_experts(6, hidden, ffn, dtype, biases=False)
    x, choice = normal(0, num_tokens, hidden, dtype=dtype), random_choice(num_tokens, 6, 3)
    tensors = {
        f"{number}.{name}.weight": getattr(expert, name).tensor
        for number, expert in enumerate(experts)
        for name in ("gate", "up", "down")
    }
    specs = [
        GatedSpec(
            LinearSpec(f"{i}.gate", ffn, hidden), LinearSpec(f"{i}.up", ffn, hidden),
            LinearSpec(f"{i}.down", hidden, ffn), "silu",
        )
        for i in range(6)
    ]  # fmt: skip
    expected = ExpertsInTurn(specs, dense_parameters(tensors, kernels), kernels)(x, *choice)
    call = compile_experts(kernels, "silu", None, experts)
    assert torch.equal(call(x, *choice), expected)
    assert torch.equal(call(x, *choice, out_dtype=dtype), expected.to(dtype))
    if kernels.can_pack((ffn, hidden), dtype):
        assert torch.equal(compile_experts(kernels, "silu", None, packed(kernels, experts))(x, *choice), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_has_the_same_bits_alone(kernels: NativeKernels, dtype: torch.dtype, threads: int) -> None:
    """One expert gets most tokens, so that its rows are more than are computed together."""
    num_tokens, hidden, ffn = 900, 64, 48
    call = compile_experts(kernels, "silu", CLAMP, random_experts(5, hidden, ffn, dtype, biases=True))
    x, (weights, chosen) = normal(0, num_tokens, hidden, dtype=dtype), random_choice(num_tokens, 5, 2)
    chosen[:, 0], chosen[:, 1] = 3, torch.where(chosen[:, 1] == 3, 4, chosen[:, 1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = call(x, weights, chosen)
    finally:
        torch.set_num_threads(before)
    for t in (0, 1, 17, 450, 899):
        assert torch.equal(call(x[t : t + 1], weights[t : t + 1], chosen[t : t + 1]), together[t : t + 1])
    assert torch.equal(call(x[100:107], weights[100:107], chosen[100:107]), together[100:107])


def test_more_tokens_than_scratch_holds_are_computed_in_parts(kernels: NativeKernels) -> None:
    num_tokens = 600_000
    call = compile_experts(kernels, "silu", None, random_experts(2, 16, 16, torch.float32, biases=False))
    x, weights = normal(0, num_tokens, 16), normal(1, num_tokens, 1)
    chosen = torch.arange(num_tokens).remainder(2).unsqueeze(1)
    last = slice(num_tokens - 300, num_tokens)
    assert torch.equal(call(x, weights, chosen)[last], call(x[last], weights[last], chosen[last]))


def test_an_expert_that_is_not_hit_is_not_read(kernels: NativeKernels) -> None:
    experts = random_experts(4, 32, 32, torch.bfloat16, biases=False)
    for number in (0, 2):
        for weight in (experts[number].gate, experts[number].up, experts[number].down):
            assert isinstance(weight, Matrix)
            weight.tensor.fill_(math.nan)
    chosen = torch.tensor([[1, 3]] * 5)
    out = compile_experts(kernels, "silu", None, experts)(
        normal(0, 5, 32, dtype=torch.bfloat16), torch.ones(5, 2), chosen
    )
    assert out.isfinite().all()


def test_no_tokens_give_no_rows(kernels: NativeKernels) -> None:
    call = compile_experts(kernels, "silu", None, random_experts(4, 32, 32, torch.float32, biases=False))
    assert call(torch.empty(0, 32), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 32)


def test_experts_that_are_not_alike_are_left_to_the_caller(kernels: NativeKernels) -> None:
    small, large = (random_experts(1, 32, ffn, torch.float32, biases=False)[0] for ffn in (16, 32))
    double = random_experts(1, 32, 16, torch.float64, biases=False)
    half = random_experts(1, 32, 16, torch.bfloat16, biases=False)[0]
    assert kernels.experts("silu", None, [small, large]) is None
    assert kernels.experts("silu", None, [small, half]) is None
    assert kernels.experts("silu", None, double) is None
    assert kernels.experts("silu", None, []) is None


RULES: dict[str, dict[str, Any]] = {
    "softmax": {"score": Score.SOFTMAX},
    "softmax renormalised, rounded": {"score": Score.SOFTMAX, "renormalise": True, "rounded": True},
    "softmax of chosen": {"score": Score.SOFTMAX_OF_CHOSEN},
    "softmax of chosen, rounded": {"score": Score.SOFTMAX_OF_CHOSEN, "rounded": True},
    "sigmoid": {"score": Score.SIGMOID, "renormalise": True},
    "corrected": {"score": Score.SIGMOID, "renormalise": True, "epsilon": 1e-20, "scale": 2.5, "is_corrected": True},
    "roots of softplus": {
        "score": Score.SQRT_SOFTPLUS,
        "renormalise": True,
        "epsilon": 1e-20,
        "scale": 1.5,
        "is_corrected": True,
    },
    "groups": {"score": Score.SIGMOID, "is_corrected": True, "num_groups": 4, "top_groups": 2, "scale": 1.5},
    "scales of logits and experts": {
        "score": Score.SOFTMAX,
        "logit_scale": 0.125,
        "renormalise": True,
        "scale": 1.5,
        "is_scaled": True,
    },
    "groups by their best": {"score": Score.SOFTMAX, "num_groups": 4, "top_groups": 2, "best_of_group": 1},
    "groups of softmax": {"score": Score.SOFTMAX, "num_groups": 8, "top_groups": 3, "renormalise": True},
}
NUM_EXPERTS, TOP_K = 72, 5


def make_router(kernels: NativeKernels | TorchKernels, rule: dict[str, Any], dtype: torch.dtype) -> ExpertRouter:
    options = dict(rule)
    correction = TensorSpec("correction", (NUM_EXPERTS,)) if options.pop("is_corrected", False) else None
    scales = TensorSpec("scales", (NUM_EXPERTS,)) if options.pop("is_scaled", False) else None
    spec = RouterSpec(
        linear=LinearSpec("router", NUM_EXPERTS, 48),
        top_k=TOP_K,
        correction=correction,
        expert_scales=scales,
        **options,
    )
    weights = {
        "router.weight": normal(0, NUM_EXPERTS, 48, dtype=dtype),
        "correction": normal(1, NUM_EXPERTS),
        "scales": normal(4, NUM_EXPERTS, dtype=dtype),
    }
    return ExpertRouter(spec, dense_parameters(weights, kernels), kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_choice_is_that_of_the_rule_written_out(kernels: NativeKernels, rule: str, dtype: torch.dtype) -> None:
    """Against the steps in PyTorch on the same logits: the same experts but for near-ties, weights within rounding."""
    router = make_router(kernels, RULES[rule], dtype)
    assert router._choose != router._choose_in_steps
    logits = normal(2, 300, NUM_EXPERTS, dtype=dtype)
    weights, chosen = router._choose(logits, dtype)
    expected, experts = router._choose_in_steps(logits, dtype)
    same = (chosen == experts).all(1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(
        weights[same], expected[same], rtol=2 * RELATIVE[dtype] if RULES[rule].get("rounded") else 5e-6, atol=1e-7
    )


def test_a_softmax_of_corrected_choices_does_not_overflow(kernels: NativeKernels) -> None:
    """Regression: the first chosen was taken for the one of the highest logit, which a correction need not leave it."""
    linear, correction = LinearSpec("router", 3, 48), torch.tensor([500.0, 0.0, -500.0])
    tensor = TensorSpec("correction", (3,))
    spec = RouterSpec(linear=linear, top_k=2, score=Score.SOFTMAX_OF_CHOSEN, correction=tensor)
    choose = kernels.expert_choice(spec, correction, None)
    assert choose is not None
    weights, chosen = choose(torch.tensor([[0.0, 200.0, 100.0]]), torch.float32)
    assert chosen.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("rule", RULES)
def test_a_row_chooses_the_same_alone(kernels: NativeKernels, rule: str) -> None:
    router = make_router(kernels, RULES[rule], torch.bfloat16)
    x = normal(3, 700, 48, dtype=torch.bfloat16)
    weights, chosen = router(x)
    for row in (0, 1, 350, 699):
        alone = router(x[row : row + 1])
        assert torch.equal(alone[0], weights[row : row + 1])
        assert torch.equal(alone[1], chosen[row : row + 1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_every_choice_is_of_different_experts(kernels: NativeKernels, rule: str, value: float) -> None:
    """Even of logits that are no numbers, which all count as the lowest; among equal ones the first are chosen."""
    choose = make_router(kernels, RULES[rule], torch.float32)._choose
    _, chosen = choose(torch.full((3, NUM_EXPERTS), value), torch.float32)
    assert all(len(set(row)) == TOP_K and min(row) >= 0 and max(row) < NUM_EXPERTS for row in chosen.tolist())
    if math.isnan(value) or not RULES[rule].get("is_corrected"):
        assert chosen.tolist() == [list(range(TOP_K))] * 3


def test_a_rule_with_a_field_that_the_call_does_not_know_is_left_to_the_caller(kernels: NativeKernels) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Wider(RouterSpec):
        jitter: float = 0.5

    linear = LinearSpec("router", NUM_EXPERTS, 48)
    assert kernels.expert_choice(RouterSpec(linear=linear, top_k=2, score=Score.SOFTMAX), None, None) is not None
    assert kernels.expert_choice(Wider(linear=linear, top_k=2, score=Score.SOFTMAX), None, None) is None


def test_pytorch_kernels_leave_both_to_the_caller() -> None:
    spec = RouterSpec(linear=LinearSpec("router", 4, 8), top_k=2, score=Score.SOFTMAX)
    assert TorchKernels().expert_choice(spec, None, None) is None
    assert TorchKernels().experts("silu", None, random_experts(2, 32, 16, torch.float32, biases=False)) is None
