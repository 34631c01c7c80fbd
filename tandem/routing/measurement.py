"""Bounds of the measurements that workers report. A measurement is a duration and its work, as three features of a
speed model: the values that its coefficients multiply.
"""

from tandem.core.errors import InvalidRequestError, shown
from tandem.routing.least_squares import Vector

_MIN_MS, _MAX_MS = 1e-6, 1e9  # a nanosecond to eleven days
_MAX_FEATURE = 1e18


def require_measurement(features: Vector, measured_ms: float) -> None:
    """Raises `InvalidRequestError` unless the duration and the work are plausible, with at least one unit of work.

    NOTE: their squares and sums are then finite and above zero. Beyond that one sample could turn the coefficients of a
    kind to NaN or zero for good.
    """
    is_time = _MIN_MS <= measured_ms <= _MAX_MS
    if not (is_time and all(0 <= value <= _MAX_FEATURE for value in features) and max(features) >= 1):
        raise InvalidRequestError(
            f"measured_ms={shown(measured_ms)} for {shown(features)} is no measurement; "
            f"a time of {_MIN_MS:g} to {_MAX_MS:g} ms for 1 to {_MAX_FEATURE:g} units of work is"
        )
