"""Amounts are exact and bounded."""

import pytest

from tandem.accounts.money import format_nanos, parse_nanos
from tandem.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "nanos"), [("0", 0), ("1", 10**9), ("0.000000001", 1), (" 12.5 ", 12_500_000_000), ("4e6", 4 * 10**15)]
)
def test_amounts(text: str, nanos: int) -> None:
    assert parse_nanos(text) == nanos
    assert parse_nanos(format_nanos(nanos)) == nanos


@pytest.mark.parametrize("text", ["", "x", "-1", "NaN", "Infinity", "0.0000000001", "4000001", "1e999999999", "1,5"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_nanos(text)


def test_written_without_trailing_zeros() -> None:
    assert [format_nanos(nanos) for nanos in (0, 1, -1, 10**9, 1_500_000_000)] == [
        *("0", "0.000000001", "-0.000000001", "1", "1.5")
    ]
