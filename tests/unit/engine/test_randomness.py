"""The uniform generator is pinned, and inverse-CDF picks what the weights say."""

import torch

from tandem.engine.randomness import choice_seed, inverse_cdf, uniform


def test_uniform_is_pinned_across_platforms_and_releases() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 7), uniform(2**64 - 1, 7)] == [
        0.8828817498738244,
        0.071402750770309,
        0.4774005128244152,
        0.3380831770219397,
        0.013116560282938727,
    ]


def test_uniform_is_in_range_and_evenly_spread() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), bins=20, min=0.0, max=1.0)
    chi_square = ((counts - 500.0) ** 2 / 500.0).sum().item()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_choices_get_their_own_seeds_and_the_first_keeps_the_requests() -> None:
    seeds = [choice_seed(42, choice) for choice in range(128)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**64 for seed in seeds[1:])


def test_inverse_cdf_picks_the_first_index_whose_cumulative_weight_exceeds_the_target() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    picks = {
        u: inverse_cdf(weights, torch.tensor([u], dtype=torch.float64)).item() for u in (0.0, 0.24, 0.25, 0.74, 0.75)
    }
    assert picks == {0.0: 0, 0.24: 0, 0.25: 2, 0.74: 2, 0.75: 3}


def test_inverse_cdf_never_picks_zero_weight_at_the_edges() -> None:
    almost_one = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    for width in (5, 128, 129, 1000, 50257):
        weights = torch.zeros(1, width)
        weights[0, [width // 3, width // 2]] = torch.tensor([1e-30, 0.3])
        assert inverse_cdf(weights, almost_one).item() == width // 2
        assert inverse_cdf(weights, zero).item() == width // 3


def test_wide_rows_agree_with_one_cumulative_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(4, 1000, generator=generator, dtype=torch.float64)
    cumulative = weights.cumsum(-1)
    for step in range(200):
        uniforms = torch.tensor([uniform(row, step) for row in range(4)], dtype=torch.float64)
        expected = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
        assert torch.equal(inverse_cdf(weights, uniforms), expected)
