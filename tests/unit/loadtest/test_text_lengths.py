"""Lengths as they are typed."""

import pytest

from tandem.core.errors import ConfigurationError
from tandem.loadtest.text_lengths import parse_lengths
from tandem.workload.lengths import Fixed, LogNormal, Uniform


def test_each_form() -> None:
    assert parse_lengths("256") == Fixed(256)
    assert parse_lengths("64-512") == Uniform(64, 512)
    assert parse_lengths("lognormal:256,1024,4096") == LogNormal(256, 1024, 4096)


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "5-", "9-3", "1.5", "lognormal:1,2", "lognormal:9,3,10"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_lengths(text)
