"""Messages to a key's owner about a limit."""

import pytest

from tandem.accounts.charge import Charge
from tandem.accounts.key import KeyLimits, new_key
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.refusals import refusal
from tandem.accounts.usage import Usage


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("requests", "this API key has used up its 5 requests a minute; try again in 7.0 s"),
        (
            "input_tokens",
            "this API key has used up its 100 input tokens a minute, and this request needs 60; try again in 7.0 s",
        ),
    ],
)
def test_a_rate_is_told_in_plain_words(why: str, said: str) -> None:
    """Regression: "this request needs 1 requests of the 5 a minute that this API key has"."""
    key, _ = new_key("k", 1, limits=KeyLimits(requests_per_minute=5, input_tokens_per_minute=100))
    charge = Charge.of("c", key, Usage(num_input=60), 0)
    assert str(refusal(why, charge, 7000.0, 0, RateLimitState())) == said
