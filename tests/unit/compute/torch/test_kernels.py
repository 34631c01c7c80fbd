"""The PyTorch kernels against float64 arithmetic and by hand."""

import pytest
import torch
from torch.nn import functional

from tandem.architecture.feed_forward import Activation
from tandem.compute.torch.kernels import TorchKernels

KERNELS = TorchKernels()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_linear_widens_its_output() -> None:
    x, weight, bias = _random(3, 8).bfloat16(), _random(5, 8, seed=1).bfloat16(), _random(5, seed=2).bfloat16()
    out = KERNELS.linear(x, weight, bias, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ weight.float().T + bias.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear(activation: Activation) -> None:
    x, gate, up = _random(3, 8).double(), _random(6, 8, seed=1).double(), _random(6, 8, seed=2).double()
    act = functional.silu if activation == "silu" else lambda v: functional.gelu(v, approximate="tanh")
    expected = act(x @ gate.T) * (x @ up.T)
    out = KERNELS.gated_linear(x.float(), gate.float(), up.float(), activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(unit_offset: bool) -> None:
    x, weight = _random(4, 16), _random(16, seed=1)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + unit_offset).double()
    out = KERNELS.rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_adds_into_the_residual_first() -> None:
    x, residual, weight = _random(4, 16), _random(4, 16, seed=1), _random(16, seed=2)
    total = x + residual
    out = KERNELS.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(out, KERNELS.rms_norm(total, weight, 1e-5))


class TestRopeAndWrite:
    def _run(self, slots: list[int], **options: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {"q": _random(3, 4, 8), "k": _random(3, 2, 8, seed=1), "v": _random(3, 2, 8, seed=2)}
        angles = torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.1, 0.01]))  # rotates 6 of 8
        caches = {"k_cache": torch.zeros(3, 2, 4, 8), "v_cache": torch.zeros(3, 2, 4, 8)}
        KERNELS.rope_and_write(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            k_cache=caches["k_cache"],
            v_cache=caches["v_cache"],
            cos=angles.cos(),
            sin=angles.sin(),
            positions=torch.tensor([0, 5, 9]),
            slot_mapping=torch.tensor(slots),
            q_norm=options.get("q_norm"),
            k_norm=options.get("k_norm"),
        )
        return tensors | caches

    def test_rotates_pairs_half_a_rotation_apart(self) -> None:
        out, before = self._run([4, 5, 6])["q"], _random(3, 4, 8)
        assert torch.equal(out[0], before[0]), "position 0 does not turn"
        assert torch.equal(out[..., 6:], before[..., 6:]), "elements past the rotary dimension do not turn"
        pairs = torch.complex(before[1, :, :3], before[1, :, 3:6])
        turned = pairs * torch.polar(torch.ones(3), 5.0 * torch.tensor([1.0, 0.1, 0.01]))
        torch.testing.assert_close(torch.complex(out[1, :, :3], out[1, :, 3:6]), turned)

    def test_writes_slots_and_skips_minus_one(self) -> None:
        out = self._run([4, -1, 11])
        assert torch.equal(out["k_cache"][1, :, 0], out["k"][0])
        assert torch.equal(out["v_cache"][2, :, 3], out["v"][2])
        assert out["k_cache"][1:].ne(0).any(-1).sum() == 2 * 2, "two tokens, two heads, nothing else"

    def test_norms_every_head_before_turning(self) -> None:
        plain, normed = self._run([4, 5, 6]), self._run([4, 5, 6], q_norm=torch.full((8,), 2.0))
        expected = plain["q"] / plain["q"].square().mean(-1, keepdim=True).sqrt() * 2
        torch.testing.assert_close(normed["q"], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(normed["k"], plain["k"])
