import pytest

from tandem.core.errors import ConfigurationError
from tandem.planning.hardware import ACCELERATORS, LINKS, Accelerator, find_accelerator, find_link


def test_the_ridge_of_an_h100_is_the_published_one() -> None:
    """989 TFLOP/s over 3.35 TB/s."""
    assert find_accelerator("h100").ridge == pytest.approx(295, abs=0.5)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: str(accelerator.name))
def test_every_accelerator_is_found_and_plausible(accelerator: Accelerator) -> None:
    assert find_accelerator(accelerator.name.upper()) is accelerator
    assert 1 <= accelerator.flops_8bit / accelerator.flops <= 2.1
    assert 10 < accelerator.ridge < 500
    assert 0 < accelerator.usd_per_hour < 10
    assert accelerator.memory_bytes > 1e10


def test_values_are_replaced_by_ones_own() -> None:
    h100 = find_accelerator("h100, usd=0, gb=94")
    assert (h100.usd_per_hour, h100.memory_bytes, h100.flops) == (0, 94e9, 989e12)
    link = find_link("tcp-25g,gbit-per-s=50,share=0.5,latency-ms=0")
    assert (link.usable_bytes_per_s, link.latency_ms) == (3.125e9, 0)


def test_links_carry_their_line_rate() -> None:
    assert {link.name: link.bytes_per_s for link in LINKS}["rdma-400g"] == 50e9
    assert all(0 < link.share < 1 for link in LINKS)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h900", "'h900' is not known; choose one of h100"),
        ("h100,watt=3", "'watt=3' is not understood"),
        ("h100,gb", "'gb' is not above zero; write gb=NUMBER"),
        ("h100,gb=0", "'gb=0' is not above zero"),
        ("h100,gb=-1", "'gb=-1' is not above zero"),
        ("h100,gb=inf", "'gb=inf' is not above zero"),
        ("h100,usd=-2", "'usd=-2' is not above zero"),
        ("h100,gb=nan", "'gb=nan' is not above zero"),
    ],
)
def test_bad_hardware_is_named_with_the_remedy(spec: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_accelerator(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize(("spec", "words"), [("wire", "choose one of nvlink"), ("tcp-25g,share=2", "no more than 1")])
def test_bad_links_are_named_with_the_remedy(spec: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        find_link(spec)
