"""Contract of every implementation of the kernels, against float64 arithmetic written out here.

Caches are NaN wherever nothing was written, so that a missed element shows.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tandem.architecture.feed_forward import Activation
from tandem.architecture.tensors import LinearSpec, ShardAxis
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip

Implementation = NativeKernels | TorchKernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "torch"])
def kernels(request: pytest.FixtureRequest) -> Implementation:
    return TorchKernels() if request.param == "torch" else load_or_skip(request.param)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def strided(x: torch.Tensor, extra: int = 8) -> torch.Tensor:
    """The same values in rows that are `extra` elements further apart, with NaN between them."""
    padded = torch.full((*x.shape[:-1], x.shape[-1] + extra), math.nan, dtype=x.dtype)
    padded[..., : x.shape[-1]] = x
    return padded[..., : x.shape[-1]]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, magnitude: float, *, slack: float = 1.0) -> None:
    """Within one rounding of the dtype, plus float32 rounding of intermediate values of size `magnitude`."""
    assert not actual.isnan().any()
    bound = RELATIVE[actual.dtype] * slack * expected.abs() + 2e-6 * magnitude
    if actual.dtype == torch.float16:
        bound = bound + 2**-24
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 700])
def test_rows_are_taken_in_the_order_asked_for(kernels: Implementation, dtype: torch.dtype, count: int) -> None:
    x = normal(0, 50, 129, dtype=dtype)
    indices = torch.randint(50, (count,), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([x[int(i)] for i in indices]) if count else x[:0]
    assert torch.equal(kernels.take_rows(x, indices), expected)
    assert torch.equal(kernels.take_rows(strided(x), indices), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 8), (1, 64, 1000), (2, 7, 24), (3, 33, 40), (6, 130, 96), (17, 30, 1000), (70, 65, 31), (200, 5, 257)],
)
def test_linear_matches_float64(kernels: Implementation, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, weight, bias = normal(m, m, k, dtype=dtype), normal(n, n, k, dtype=dtype), normal(k, n, dtype=dtype)
    expected = x.double() @ weight.double().T
    magnitude = 4 * math.sqrt(k)
    assert_close(kernels.linear(x, weight), expected, magnitude)
    assert_close(kernels.linear(strided(x), weight, bias), expected + bias.double(), magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 16), (5, 48, 576), (40, 16, 96)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kernels", ARCHITECTURES, indirect=True)
def test_parts_of_a_row_split_add_up_to_the_bits_of_the_whole(
    kernels: Implementation, dtype: torch.dtype, m: int, n: int, k: int, ranks: int
) -> None:
    """PyTorch's kernels promise no equal bits."""
    x, weight = normal(1, m, k, dtype=dtype), normal(2, n, k, dtype=dtype)
    spec = LinearSpec("down", n, k, axis=ShardAxis.ROW)
    shard = replace(spec, inputs=k // ranks, num_ranks=ranks)
    parts = [
        kernels.linear(rows, part.contiguous(), out_dtype=torch.float32, sum_blocks=shard.sum_blocks)
        for rows, part in zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    whole = kernels.linear(x, weight, out_dtype=torch.float32, sum_blocks=spec.sum_blocks)
    assert torch.equal(whole, parts[0])
    for order in (Order.ROWS, *([Order.STRIPS] if kernels.can_pack((n, k), dtype) else [])):
        again = kernels.linear(
            x, kernels.pack(weight) if order is Order.STRIPS else weight, order=order, sum_blocks=spec.sum_blocks
        )
        assert torch.equal(again, whole.to(dtype))


@pytest.mark.parametrize(("inputs", "expected"), [(64, 8), (16, 8), (24, 4), (100, 2), (2, 1), (17, 1), (576, 8)])
def test_sums_have_as_many_blocks_as_leave_an_even_number_of_inputs(inputs: int, expected: int) -> None:
    assert LinearSpec("down", 8, inputs, axis=ShardAxis.ROW).sum_blocks == expected
    assert LinearSpec("up", 8, inputs).sum_blocks == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_can_return_float32(kernels: Implementation, dtype: torch.dtype) -> None:
    """PyTorch's product is rounded to its inputs' dtype first; the compiled one is not."""
    x, weight = normal(0, 5, 100, dtype=dtype), normal(1, 19, 100, dtype=dtype)
    logits = kernels.linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    rounding = dtype if isinstance(kernels, TorchKernels) else torch.float32
    assert_close(logits, x.double() @ weight.double().T, 40.0, slack=RELATIVE[rounding] / RELATIVE[torch.float32])


def test_linear_of_no_rows_is_empty(kernels: Implementation) -> None:
    assert kernels.linear(torch.empty(0, 16), torch.ones(4, 16)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 24), (1, 50, 1000), (7, 33, 40), (64, 31, 96)])
def test_gated_linear_matches_float64(
    kernels: Implementation, dtype: torch.dtype, activation: Activation, m: int, n: int, k: int
) -> None:
    x = normal(0, m, k, dtype=dtype)
    gate, up = normal(1, n, k, dtype=dtype), normal(2, n, k, dtype=dtype)
    gated, raised = x.double() @ gate.double().T, x.double() @ up.double().T
    result = kernels.gated_linear(strided(x), gate, up, activation)
    expected = ACTIVATIONS[activation](gated) * raised
    if isinstance(kernels, TorchKernels):  # both of its products are rounded to the dtype before they are combined
        bound = 4 * RELATIVE[dtype] * (1 + gated.abs()) * (1 + raised.abs()) + 32e-6 * k
        assert ((result.double() - expected).abs() <= bound).all()
    else:
        assert_close(result, expected, 16.0 * k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("m", "n"), [(1, 16), (7, 33)])
def test_gated_linear_adds_biases_before_the_activation(
    kernels: Implementation, dtype: torch.dtype, activation: Activation, m: int, n: int
) -> None:
    """By weights of zeros: what is left is exact but for the activation."""
    x, weight = normal(0, m, 24, dtype=dtype), torch.zeros(n, 24, dtype=dtype)
    gate_bias, up_bias = normal(1, n, dtype=dtype), normal(2, n, dtype=dtype)
    result = kernels.gated_linear(x, weight, weight, activation, gate_bias, up_bias)
    expected = ACTIVATIONS[activation](gate_bias.double()) * up_bias.double()
    assert_close(result, expected.expand(m, n), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 33), (300, 256)])
def test_gated_product_matches_float64(
    kernels: Implementation, dtype: torch.dtype, activation: Activation, m: int, n: int
) -> None:
    gate, up = normal(1, m, n, dtype=dtype), normal(2, m, n, dtype=dtype)
    result = kernels.gated_product(strided(gate), strided(up, 16), activation)
    assert_close(result, ACTIVATIONS[activation](gate.double()) * up.double(), 1.0)


def test_gated_product_of_no_rows_is_empty(kernels: Implementation) -> None:
    assert kernels.gated_product(torch.empty(0, 16), torch.empty(0, 16), "silu").shape == (0, 16)


def test_gated_linear_saturates_instead_of_overflowing(kernels: Implementation) -> None:
    x = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    weight = torch.eye(2)
    result = kernels.gated_linear(x, weight, torch.ones(2, 2), "silu")
    assert result.flatten().tolist() == pytest.approx([1e6, 0.0, 0.0, 0.0], abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1024), (5, 1000), (3, 4, 128), (2, 3, 24)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_matches_float64(
    kernels: Implementation, dtype: torch.dtype, shape: tuple[int, ...], unit_offset: bool
) -> None:
    x, weight = normal(0, *shape, dtype=dtype), normal(1, shape[-1], dtype=dtype)
    expected = norm64(x.double(), weight, 1e-5, unit_offset)
    assert_close(kernels.rms_norm(strided(x), weight, 1e-5, unit_offset=unit_offset), expected, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_into_the_residual_and_norms_the_rounded_sum(kernels: Implementation, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(i, 9, 520, dtype=dtype) for i in range(3))
    summed, weight = (residual.float() + x.float()).to(dtype), weight[0].contiguous()
    normed = kernels.rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, summed)
    assert_close(normed, norm64(summed.double(), weight, 1e-6, False), 1.0)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * (weight.double() + (1.0 if unit_offset else 0.0))


def rope64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation of the pairs (d, d + half) as complex numbers."""
    half = cos.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["none", "both", "both with unit offset"])
@pytest.mark.parametrize(
    ("head_dim", "half", "block_size"), [(64, 32, 16), (128, 64, 8), (40, 20, 32), (96, 24, 16), (512, 256, 8)]
)
def test_rope_and_write_rotates_and_stores(
    kernels: Implementation, dtype: torch.dtype, norms: str, head_dim: int, half: int, block_size: int
) -> None:
    tokens, num_heads, num_kv_heads = 7, 4, 2
    fused = normal(0, tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = (fused.view(tokens, -1, head_dim)[:, heads] for heads in (slice(4), slice(4, 6), slice(6, 8)))
    angles = normal(1, 500, half)
    cos, sin = angles.cos().float(), angles.sin().float()
    positions = torch.tensor([3, 499, 0, 17, 18, 250, 4])
    slots = torch.tensor(
        [3 * block_size + 5, 2 * block_size, -1, block_size, 2 * block_size - 1, 4 * block_size, 4 * block_size + 1]
    )
    arena = torch.full((5, 2, 2, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    k_cache, v_cache = arena[:, 1, 0], arena[:, 1, 1]
    weights = (normal(2, head_dim, dtype=dtype), normal(3, head_dim, dtype=dtype)) if norms != "none" else (None, None)
    unit_offset = norms == "both with unit offset"
    expected = []
    for heads, weight in zip((q, k), weights, strict=True):
        x = heads.double() if weight is None else norm64(heads.double(), weight, 1e-6, unit_offset)
        expected.append(rope64(x, cos[positions].double(), sin[positions].double()))
    original_v = v.clone()

    kernels.rope_and_write(
        q, k, v, cos, sin, positions, slots, k_cache, v_cache,
        q_norm=weights[0], k_norm=weights[1], norm_eps=1e-6, unit_offset=unit_offset,
    )  # fmt: skip

    assert_close(q, expected[0], 8.0)
    assert_close(k, expected[1], 8.0)
    assert torch.equal(v, original_v)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k_cache[slot // block_size, :, slot % block_size], k[token])
            assert torch.equal(v_cache[slot // block_size, :, slot % block_size], v[token])
    for cache in (k_cache[1:], v_cache[1:]):  # a token without a slot may go to the null block, which nobody reads
        assert int((~cache.isnan()).sum()) == 6 * num_kv_heads * head_dim
    assert arena[:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [None, False, True])
def test_rotate_does_what_rope_and_write_does_with_queries(
    kernels: Implementation, dtype: torch.dtype, unit_offset: bool | None
) -> None:
    """`unit_offset` None: without a norm."""
    q = strided(normal(0, 5, 3 * 64, dtype=dtype)).view(5, 3, 64)
    expected, others = q.clone(), torch.zeros(5, 1, 64, dtype=dtype)
    angles, positions = normal(1, 500, 32), torch.tensor([3, 499, 0, 17, 18])
    cos, sin = angles.cos().float(), angles.sin().float()
    norm = None if unit_offset is None else normal(2, 64, dtype=dtype)
    cache, slots = torch.zeros(2, 1, 8, 64, dtype=dtype), torch.full((5,), -1)
    offset = bool(unit_offset)
    kernels.rope_and_write(
        expected, others, others.clone(), cos, sin, positions, slots, cache, cache.clone(),
        q_norm=norm, norm_eps=1e-5, unit_offset=offset,
    )  # fmt: skip
    kernels.rotate(q, cos, sin, positions, norm=norm, norm_eps=1e-5, unit_offset=offset)
    assert torch.equal(q, expected)


def balanced(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """As `Kernels.sinkhorn` says, in the dtype of `logits`."""
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize(("count", "iterations"), [(0, 20), (1, 1), (300, 20)])
def test_rows_and_columns_are_divided_by_their_sums_in_turn(
    kernels: Implementation, size: int, count: int, iterations: int
) -> None:
    numbers = strided(4 * normal(40, count, size * size).float())
    logits = numbers.view(count, size, size) if count else numbers.new_empty(0, size, size)
    mix = kernels.sinkhorn(logits, iterations, 1e-6)
    assert_close(mix, balanced(logits.double(), iterations, 1e-6), 10.0)
    if iterations > 1:
        torch.testing.assert_close(mix.sum(1), torch.ones(count, size), rtol=0, atol=1e-5)
    alone = [kernels.sinkhorn(each[None], iterations, 1e-6) for each in logits]
    assert all(torch.equal(one[0], other) for one, other in zip(alone, mix, strict=True))
