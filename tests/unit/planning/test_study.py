import pytest

from tandem.architecture.catalogue import find_cost
from tandem.core.errors import ConfigurationError
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.profile import Profile, draw_profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import DeploymentSite, Goals
from tandem.planning.study import study
from tandem.workload.lengths import Fixed


def site(shape: str = "qwen3-8b", prefill: str = "h100", decode: str = "h100", longest: int = 2000) -> DeploymentSite:
    model = find_cost(shape)
    return DeploymentSite(
        prefill=Roofline(model, find_accelerator(prefill)),
        decode=Roofline(model, find_accelerator(decode)),
        link=find_link("rdma-400g"),
        profile=draw_profile(Fixed(longest), Fixed(300)),
        goals=Goals(ttft_ms=1000, tpot_ms=50),
    )


def test_every_rate_has_its_choice_and_the_highest_is_the_peak() -> None:
    found = study(site(), [5, 40, 10])
    assert [choice.apart.rate_per_s for choice in found.choices] == [5, 40, 10]
    assert found.peak is found.choices[1]
    assert found.fits


def test_the_alternative_is_of_the_cheaper_kind() -> None:
    """A kind that cannot meet an objective is no alternative, however cheap."""
    assert study(site(decode="h200,usd=99"), [20]).peak.together_roofline.hardware.name == "h100"
    assert study(site(decode="h200,usd=1"), [20]).peak.together_roofline.hardware.name == "h200"
    slow = study(site(decode="l40s,gb-per-s=100,usd=0"), [20]).peak
    assert slow.together_roofline.hardware.name == "h100"
    assert not slow.together.problems


def test_what_does_not_fit_is_known() -> None:
    assert not study(site("llama-3-70b"), [1]).fits
    assert not study(site(longest=400_000), [0.1]).fits


def test_facts_are_of_each_kind() -> None:
    found = study(site(decode="h200"), [1])
    assert (found.prefill.hardware, found.decode.hardware) == ("h100", "h200")
    assert found.decode.step_ms < found.prefill.step_ms
    assert found.hand_off.num_bytes == 2000 * 147_456


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_rates_that_are_none_are_refused(rates: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="requests a second"):
        study(site(), rates)


def test_one_request_is_a_workload() -> None:
    one = site()
    alone = DeploymentSite(
        prefill=one.prefill, decode=one.decode, link=one.link, profile=Profile([(1, 1)]), goals=one.goals
    )
    peak = study(alone, [0.001]).peak
    assert peak.apart.num_accelerators == 2
    assert peak.together.num_accelerators == 1
