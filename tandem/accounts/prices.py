"""Prices of tokens: four classes of prompt tokens, and output. Exact: integers in, integers out.

Invariant: a request's cost is rounded once, up to the next nano; totals are sums of such costs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path

from tandem.accounts.usage import Usage
from tandem.core.errors import ConfigurationError, shown

_PICOS_PER_NANO = 1000
_MAX_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in millionths of a unit for a million tokens, which equals picos (10^-12 units) for one token."""

    input: int = 1_000_000
    output: int = 5_000_000
    cache_write_5m: int = 1_250_000
    cache_write_1h: int = 2_000_000
    cache_read: int = 100_000

    def cost_nanos(self, usage: Usage) -> int:
        picos = (
            usage.num_input * self.input
            + usage.num_output * self.output
            + usage.num_written_5m * self.cache_write_5m
            + usage.num_written_1h * self.cache_write_1h
            + usage.num_read * self.cache_read
        )
        return -(-picos // _PICOS_PER_NANO)

    @property
    def most_expensive(self) -> "Prices":
        """Upper bounds of the prices, for reservations: planned cache writes may be billed as reads or plain input."""
        read_or_not = max(self.input, self.cache_read)
        written_5m = max(read_or_not, self.cache_write_5m)
        return replace(
            self, input=read_or_not, cache_write_5m=written_5m, cache_write_1h=max(written_5m, self.cache_write_1h)
        )

    @classmethod
    def parse(cls, text: str | None) -> "Prices":
        """Parses JSON, or a file of it: units for a million tokens, such as {"input": 3, "output": 15}.

        Omitted cache prices follow from `input`: 1.25 times for five minutes, 2 times for an hour, a tenth for reading.

        Raises:
            ConfigurationError: naming the invalid price.
        """
        if text is None:
            return cls()
        given = _read(text)
        unknown = given.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigurationError(f"prices names {shown(min(unknown))}; known: {', '.join(cls.__slots__)}")
        whole = {name: _price(name, value) for name, value in given.items()}
        base = whole.get("input", cls().input)
        # NOTE: rounded up, and only where a price has more than four decimals
        derived = {"cache_write_5m": -(-base * 5 // 4), "cache_write_1h": 2 * base, "cache_read": -(-base // 10)}
        return cls(**{**derived, **whole})


def _read(text: str) -> Mapping[str, object]:
    try:
        content = text if text.lstrip().startswith("{") else Path(text).read_text()
        given = json.loads(content, parse_float=Decimal)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"prices={shown(text)} is neither JSON nor a file of it: {error}") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f'prices={shown(text)} must be an object such as {{"input": 3, "output": 15}}')
    return given


def _price(name: str, value: object) -> int:
    try:
        is_number = isinstance(value, int | Decimal | str) and not isinstance(value, bool)
        millionths = Decimal(str(value)) * 1_000_000 if is_number else Decimal("NaN")
        if millionths.is_finite() and 0 <= millionths <= _MAX_PRICE * 1_000_000 and millionths == int(millionths):
            return int(millionths)
    except ArithmeticError:  # no number, or one of far too many digits
        pass
    raise ConfigurationError(
        f"prices.{name}={shown(value)} must be a number of units for a million tokens, from 0 to {_MAX_PRICE}, with at "
        "most six decimals"
    )
