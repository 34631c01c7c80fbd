"""Pin: a request's wish to keep the KV of a prefix of its prompt in the cache for a time."""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, shown

MAX_PINS = 8  # of one request
MAX_TTL_S = 24 * 3600.0  # of a pin


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the KV of the first `num_tokens` prompt tokens for `ttl_s` seconds from when it is computed or found.

    Raises:
        InvalidRequestError: naming the value that cannot be honoured.
    """

    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or not 0 <= self.num_tokens < 2**31:
            raise InvalidRequestError(f"pin.num_tokens={shown(self.num_tokens)} must be an integer from 0 up")
        if not isinstance(self.ttl_s, (int, float)) or not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidRequestError(f"pin.ttl_s={shown(self.ttl_s)} must be above 0, at most {MAX_TTL_S:g} seconds")
