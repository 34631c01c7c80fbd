import pytest

from tandem.architecture.catalogue import find_cost
from tandem.architecture.draft_cost import DrafterCost
from tandem.core.errors import ConfigurationError
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import DeploymentSite, Goals


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ttft_ms": 0.0}, "ttft_ms=0; an objective"),
        ({"tpot_ms": float("inf")}, "tpot_ms=inf"),
        ({"share": 1.0}, "share=1; use a share"),
        ({"max_use": 0.0}, "max_use=0"),
        ({"max_link_use": 1.5}, "max_link_use=1.5"),
        ({"max_running": 0}, "max_running=0, chunk_tokens=2048"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
    ],
)
def test_goals_that_nothing_can_meet_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Goals(**{"ttft_ms": 100.0, "tpot_ms": 10.0, **wrong})  # type: ignore[arg-type]


def test_the_link_carries_the_kv_of_every_prompt() -> None:
    """Cached prompts too: a decode worker may hold none of them."""
    roofline = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))
    site = DeploymentSite(
        prefill=roofline,
        decode=roofline,
        link=find_link("rdma-400g"),
        profile=Profile([(1000, 1), (3000, 1)], prefix_hit=0.5),
        goals=Goals(ttft_ms=100, tpot_ms=10),
    )
    assert site.link_bytes_per_s(10) == pytest.approx(10 * 2000 * 147_456)
    assert site.hand_off(3000).num_bytes == 3000 * 147_456


def test_the_link_carries_the_kv_of_a_head_too() -> None:
    """A hand-off counted it, and the need for link bandwidth did not."""
    model = find_cost("qwen3-8b")
    head = PlannedDrafts(drafter=DrafterCost(find_cost("qwen3-0.6b"), is_head=True), acceptance=0.6, most=3)
    roofline = Roofline(model, find_accelerator("h100"), drafts=head)
    site = DeploymentSite(
        prefill=roofline,
        decode=roofline,
        link=find_link("rdma-400g"),
        profile=Profile([(2000, 1)]),
        goals=Goals(ttft_ms=100, tpot_ms=10),
    )
    assert site.link_bytes_per_s(10) == pytest.approx(10 * site.hand_off(2000).num_bytes)
    assert site.hand_off(2000).num_bytes > model.kv_bytes(2000)
