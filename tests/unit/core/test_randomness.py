"""Seeds and draws are pinned: a stream that moves between two releases must go on alike."""

from tandem.core.randomness import choice_seed, uniform


def test_draws_and_seeds_are_pinned_across_platforms_and_releases() -> None:
    assert [uniform(0, 0), uniform(-1, 7), uniform(2**64 - 1, 7)] == [
        0.8828817498738244,
        0.3380831770219397,
        0.013116560282938727,
    ]
    assert choice_seed(5, 0) == 5
    assert 0 <= choice_seed(5, 1) < 2**64
    assert choice_seed(5, 1) != choice_seed(5, 2)
