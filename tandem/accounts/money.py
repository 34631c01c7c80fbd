"""Amounts of money as integers: a nano is a billionth of a unit of currency. No floats."""

from decimal import Decimal, InvalidOperation

from tandem.core.errors import InvalidRequestError, shown

NANOS_PER_UNIT = 10**9
MAX_UNITS = 4_000_000  # NOTE: in nanos it is below 2**53, so that stores which count in doubles are exact, too


def parse_nanos(text: str) -> int:
    """Parses a decimal amount of units, such as "12.50".

    Raises:
        InvalidRequestError: it is no amount, negative, too large, or has more than nine decimals.
    """
    try:
        units = Decimal(text.strip())
    except InvalidOperation as error:
        raise InvalidRequestError(f"{shown(text)} is no amount; write one such as 12.50") from error
    if units.is_finite() and 0 <= units <= MAX_UNITS:
        nanos = units * NANOS_PER_UNIT
        if nanos == int(nanos):
            return int(nanos)
    raise InvalidRequestError(f"{shown(text)} must be from 0 to {MAX_UNITS} with at most nine decimals")


def format_nanos(nanos: int) -> str:
    """The exact decimal amount of units, without trailing zeros."""
    whole, rest = divmod(abs(nanos), NANOS_PER_UNIT)
    sign = "-" if nanos < 0 else ""
    decimals = f"{rest:09d}".rstrip("0")
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"
