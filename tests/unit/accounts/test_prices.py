"""Prices are read exactly, and costs are rounded once."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.accounts.prices import Prices
from tandem.accounts.usage import Usage
from tandem.core.errors import ConfigurationError

COUNT = st.integers(0, 10**7)
PRICE = st.integers(0, 10**9)


def test_each_kind_has_its_price() -> None:
    million = 10**6
    one = [Usage(million), Usage(0, million), Usage(0, 0, million), Usage(0, 0, 0, million), Usage(0, 0, 0, 0, million)]
    assert [Prices().cost_nanos(usage) for usage in one] == [
        1_000_000_000,
        1_250_000_000,
        2_000_000_000,
        100_000_000,
        5_000_000_000,
    ]


@given(st.builds(Usage, COUNT, COUNT, COUNT, COUNT, COUNT), st.builds(Prices, PRICE, PRICE, PRICE, PRICE, PRICE))
def test_costs_are_exact_but_for_one_rounding_up(usage: Usage, prices: Prices) -> None:
    exact = sum(
        Fraction(count * price, 1000)
        for count, price in (
            (usage.num_input, prices.input),
            (usage.num_written_5m, prices.cache_write_5m),
            (usage.num_written_1h, prices.cache_write_1h),
            (usage.num_read, prices.cache_read),
            (usage.num_output, prices.output),
        )
    )
    assert 0 <= prices.cost_nanos(usage) - exact < 1


def test_prices_from_json_or_a_file(tmp_path: Path) -> None:
    text = '{"input": 3, "output": "15", "cache_read": 0.3}'
    path = tmp_path / "prices.json"
    path.write_text(text)
    expected = Prices(3_000_000, 15_000_000, 3_750_000, 6_000_000, 300_000)
    assert Prices.parse(text) == Prices.parse(str(path)) == expected
    assert Prices.parse(None) == Prices.parse("{}") == Prices()
    assert Prices.parse('{"input": 0.075}').cache_read == 7_500


@pytest.mark.parametrize(
    "text",
    [
        *("nowhere.json", "{", "[1]", '{"speed": 1}', '{"input": -1}', '{"input": true}', '{"input": null}'),
        *('{"input": 0.0000001}', '{"input": 1e9}', '{"input": NaN}', '{"input": "x"}', '{"input": "1e999999999"}'),
    ],
)
def test_prices_that_cannot_be_taken(text: str) -> None:
    with pytest.raises(ConfigurationError, match="prices"):
        Prices.parse(text)
