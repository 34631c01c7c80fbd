import pytest

from tandem.core.errors import ConfigurationError
from tandem.planning.profile import Profile, draw_profile, sample_profile
from tandem.workload.lengths import Fixed, LogNormal, Uniform


def test_means_and_shares_of_what_is_asked() -> None:
    profile = Profile([(100, 10), (200, 10), (300, 20), (1000, 40)], prefix_hit=0.25)
    assert (profile.mean_prompt, profile.mean_output, profile.longest) == (400, 20, 1040)
    assert (profile.prompt_at(0.5), profile.prompt_at(0.75), profile.prompt_at(0.95)) == (200, 300, 1000)
    assert profile.cached(400) == 100


def test_long_answers_weigh_in_the_context_of_those_that_decode() -> None:
    profile = Profile([(100, 10), (1000, 90)])
    assert profile.mean_context == pytest.approx((10 * 105 + 90 * 1045) / 100)


def test_the_same_words_draw_the_same_lengths() -> None:
    lengths = LogNormal(1000, 4000, 16_000), Uniform(10, 50)
    assert draw_profile(*lengths) == draw_profile(*lengths)
    drawn = draw_profile(*lengths)
    assert drawn.prompt_at(0.5) == pytest.approx(1000, rel=0.1)
    assert drawn.prompt_at(0.9) == pytest.approx(4000, rel=0.15)
    assert draw_profile(Fixed(7), Fixed(3)).mean_context == 8.5


def test_a_long_trace_is_thinned_evenly_and_keeps_its_largest_request() -> None:
    profile = sample_profile([(prompt, 5) for prompt in range(1, 20_001)])
    assert len(profile.lengths) == 1000
    assert profile.mean_prompt == pytest.approx(10_000, rel=0.01)
    assert profile.longest == 20_005
    assert sample_profile([(3, 4), (1, 2)]).lengths == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("lengths", "hit"), [([], 0.0), ([(0, 1)], 0.0), ([(1, 0)], 0.0), ([(1, 1)], 1.0), ([(1, 1)], -0.1)]
)
def test_impossible_workloads_are_refused(lengths: list[tuple[int, int]], hit: float) -> None:
    with pytest.raises(ConfigurationError):
        Profile(lengths, hit)
