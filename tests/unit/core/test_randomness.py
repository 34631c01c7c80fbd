"""Seeds and draws are pinned: a stream that moves between two releases must go on alike."""

from collections import Counter

from tandem.core.randomness import choice_seed, derived_uniform, uniform


def test_draws_and_seeds_are_pinned_across_platforms_and_releases() -> None:
    assert [uniform(0, 0), uniform(-1, 7), uniform(2**64 - 1, 7)] == [
        0.8828817498738244,
        0.3380831770219397,
        0.013116560282938727,
    ]
    assert choice_seed(5, 0) == 5
    assert 0 <= choice_seed(5, 1) < 2**64
    assert choice_seed(5, 1) != choice_seed(5, 2)


def test_numbers_that_follow_are_pinned_in_range_and_evenly_spread() -> None:
    numbers = [uniform(0, 0)]
    for _ in range(10_000):
        numbers.append(derived_uniform(numbers[-1]))
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    counts = Counter(int(20 * number) for number in numbers[1:])
    assert sum((counts[i] - 500) ** 2 / 500 for i in range(20)) < 43.8  # 19 degrees of freedom, p = 0.001
    assert numbers[1:3] == [0.619258041154156, 0.6694307045661528]
    assert 0.0 <= derived_uniform(0.0) < 1.0
    assert 0.0 <= derived_uniform(1.0 - 2.0**-53) < 1.0
