"""Rewrites the numbers of JSON schemas so that llguidance enforces them, and finds those that it could not. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from tandem.core.errors import shown

MAX_MULTIPLE = 10_000  # largest `multipleOf`, counted in its last decimal place
_MAX_PLACES = 9  # of a `multipleOf`
_MAX_JOINT = 2**32  # NOTE: llguidance (1.9.1) multiplies two multiples in 32 bits, and does not notice an overflow
_MAX_JOINTS = 256  # numbers that are multiples of several `multipleOf` at once, that are looked at
_MAX_EXACT = 2**53
_LEAST_NUMBER = 1e-30  # that is written beside an exclusive bound of 0
# By name of an exclusive bound: the inclusive one, and where what is allowed lies.
_EXCLUSIVE = {"exclusiveMinimum": ("minimum", math.inf), "exclusiveMaximum": ("maximum", -math.inf)}

NUMBERS = ("minimum", "maximum", *_EXCLUSIVE, "multipleOf")
_Decimal = tuple[int, int]  # digits, and how many of them are decimal places


def number_fault(schema: Mapping[str, Any]) -> str | None:
    """Reason why the numbers of a schema, its inner schemas aside, cannot be enforced; None if they can."""
    for key in ("const", "enum", *NUMBERS):
        if key in schema and any(abs(number) > _MAX_EXACT for number in _whole_numbers(schema[key])):
            return f"{key} holds an integer beyond 2^53, which cannot be enforced exactly"
    for exclusive, (bound, _) in _EXCLUSIVE.items():
        if schema.get(exclusive) is True and bound not in schema:
            return f"{exclusive}=true has no meaning without {bound}"
    for key in NUMBERS:
        if key in schema and not _is_number(schema[key]) and not (key in _EXCLUSIVE and isinstance(schema[key], bool)):
            return f"{key}={shown(schema[key])} must be a number"
    multiple = schema.get("multipleOf", 1)
    if not 0 < _num_steps(multiple) <= MAX_MULTIPLE:
        return f"multipleOf={multiple} has too many digits; at most {MAX_MULTIPLE} times a power of ten"
    return None


def with_safe_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, without a `number_fault`, with bounds that llguidance enforces.

    NOTE: until draft 4 exclusive bounds were flags of `minimum` and `maximum`.
    """
    for exclusive, (bound, direction) in _EXCLUSIVE.items():
        if schema.get(exclusive) is True:
            schema[exclusive] = schema.pop(bound)
        if schema.get(exclusive) is False:
            del schema[exclusive]
        elif "multipleOf" in schema:
            _close(schema, exclusive, bound, schema["multipleOf"])
        elif exclusive in schema:
            schema[exclusive] = _beyond(schema[exclusive], direction)
    return _split_at_zero(schema) if "multipleOf" in schema else schema


def _close(schema: dict[str, Any], exclusive: str, inclusive: str, multiple_of: float) -> None:
    """Replaces both bounds by the last multiple within them.

    NOTE: llguidance (1.9.1) wants more decimal places of a number that a bound begins with, as 9.9 below 9.95, but a
    multiple has only as many as its step.
    """
    step, unit = Decimal(str(multiple_of)), Decimal(1).scaleb(-_decimal(multiple_of)[1])
    sign = 1 if inclusive == "maximum" else -1  # NOTE: a minimum is the maximum of the negated numbers
    last: list[Decimal] = []
    for key in (exclusive, inclusive):
        if key not in schema:
            continue
        steps = sign * Decimal(str(schema.pop(key))) / step
        last.append(steps.to_integral_value(ROUND_FLOOR))
        if key == exclusive and last[-1] == steps:
            last[-1] -= 1
    if not last:
        return
    multiple = sign * min(last) * step
    if multiple % 1 and not multiple % (10 * unit):
        schema[exclusive] = float(multiple + sign * unit)  # NOTE: so that there is room for its zeros at the end
    else:
        schema[inclusive] = _plain(multiple)


def _split_at_zero(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with negative multiples apart from the others.

    NOTE: within bounds on both sides of 0, llguidance (1.9.1) wants negative numbers without a zero at the end, but
    wants a zero in multiples of 0.01, as in -0.50.
    """
    step, others = schema["multipleOf"], schema.get("allOf", [])
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    is_bounded = low is not None or high is not None
    spans_zero = (low is None or low < 0) and (high is None or high >= 0)
    if is_bounded and spans_zero and not _is_whole(step) and isinstance(others, (list, tuple)):
        schema["allOf"] = [*others, {"anyOf": [{"minimum": 0}, {"maximum": -step}]}]
    return schema


def _plain(number: Decimal) -> float:
    return int(number) if number == number.to_integral_value() else float(number)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(number: float) -> bool:
    return isinstance(number, int) or number.is_integer()


def are_joinable(multiples: Iterable[float]) -> bool:
    """Whether llguidance can enforce any of these `multipleOf`, each without a `number_fault`, at once."""
    found = {_decimal(multiple) for multiple in multiples}
    waiting = list(found)
    while waiting:
        one = waiting.pop()
        for other in tuple(found):
            joint = _joint(one, other)
            if joint is None or len(found) > _MAX_JOINTS:
                return False
            if joint not in found:
                found.add(joint)
                waiting.append(joint)
    return True


def _joint(one: _Decimal, other: _Decimal) -> _Decimal | None:
    """The least common multiple; None where llguidance would overflow."""
    places = max(one[1], other[1])
    first, second = (digits * 10 ** (places - num_places) for digits, num_places in (one, other))
    return None if first * second >= _MAX_JOINT else _shortest(math.lcm(first, second), places)


def _shortest(digits: int, places: int) -> _Decimal:
    while places and digits % 10 == 0:
        digits, places = digits // 10, places - 1
    return digits, places


def _decimal(number: float) -> _Decimal:
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))) * 10 ** max(exponent, 0), max(-exponent, 0)


def _num_steps(multiple: float) -> int:
    """The multiple without its decimal point, such as 25 for 0.25; 0 where it is none, or has too many places."""
    if not 0 < multiple < 1e12:
        return 0
    digits, places = _decimal(multiple)
    return digits if places <= _MAX_PLACES else 0


def _beyond(bound: float, direction: float) -> float:
    """An exclusive bound that is a whole number, moved as little as a double can be; any other value as it is.

    NOTE: where both bounds have one integer part, as 0 and 0.5, llguidance (1.9.1) lets the whole number itself pass.
    That part is then the bound nearer to 0. The other one is not moved, or 9.9 below 10 would have to be 9.90.
    """
    if not _is_whole(bound) or bound * direction < 0:
        return bound
    moved = math.nextafter(bound, direction) if bound else math.copysign(_LEAST_NUMBER, direction)
    return bound if moved.is_integer() else moved


def _whole_numbers(value: object) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _whole_numbers(inner)
    elif isinstance(value, (int, float)) and _is_whole(value):
        yield value
