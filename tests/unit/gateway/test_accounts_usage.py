"""A request's tokens for its bill: what they were, and the most they may be."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tandem.accounts.accounts import Accounts
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.key import new_key
from tandem.accounts.prices import Prices
from tandem.accounts.usage import Usage
from tandem.core.clock import ManualClock
from tandem.core.fresh_numbers import FreshNumbers
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.gateway.accounts_usage import most_usage, usage_of_results
from tandem.gateway.choices import make_choices
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ChoiceResult, ServeRequest


def request_of(prompts: list[list[int]], *pins: Pin, n: int = 1, max_tokens: int | None = 10) -> ServeRequest:
    choices = make_choices("r", prompts, SamplingParams(n=n, max_tokens=max_tokens, seed=1), FreshNumbers())
    return ServeRequest(request_id="r", model="m", choices=choices, num_expected_output=1, pins=pins, scope=UNSCOPED)


def result(num_prompt: int, num_output: int, num_cached: int = 0, *pins: Pin) -> ChoiceResult:
    return ChoiceResult(num_prompt, True, num_output_tokens=num_output, num_cached_tokens=num_cached, granted=pins)


def test_a_prompt_counts_once_however_many_answers_it_got() -> None:
    request = request_of([[1, 2, 3], [1, 2, 3], [4]], n=2)
    results = [result(3, 5), result(3, 6, 2), result(3, 7, 2), result(3, 8), result(1, 1), result(1, 0)]
    assert usage_of_results(request, results) == Usage(num_input=5, num_read=2, num_output=27)


def test_a_prompt_of_which_nothing_came_is_free() -> None:
    request = request_of([[1, 2, 3], [4, 5]])
    assert usage_of_results(request, [result(3, 0), result(2, 1)]) == Usage(num_input=2, num_output=1)


def test_what_was_generated_counts_though_nobody_took_it() -> None:
    request = request_of([[1, 2, 3], [4, 5]])
    usage = usage_of_results(request, [result(3, 0), result(2, 4)], {0: 2, 1: 3})
    assert usage == Usage(num_input=5, num_output=6)


def test_pins_are_written_and_the_four_add_up() -> None:
    pins = (Pin(4, 3600.0), Pin(7, 300.0))
    request = request_of([list(range(10))], *pins)
    usage = usage_of_results(request, [result(10, 2, 0, *pins)])
    assert usage == Usage(num_input=3, num_written_5m=3, num_written_1h=4, num_read=0, num_output=2)


def test_the_most_is_as_long_as_it_may_be() -> None:
    assert most_usage(request_of([[1, 2, 3]], n=2), 100) == Usage(num_input=3, num_output=20)
    assert most_usage(request_of([[1, 2, 3]]), 8) == Usage(num_input=3, num_output=5)
    assert most_usage(request_of([[1, 2, 3]], max_tokens=None), 100) == Usage(num_input=3, num_output=97)
    assert most_usage(request_of([[1], [2, 3]], max_tokens=4), None) == Usage(num_input=3, num_output=8)


def test_the_most_is_that_every_pin_is_granted() -> None:
    pins = (Pin(4, 3600.0), Pin(7, 300.0), Pin(2, 3600.0))
    most = most_usage(request_of([list(range(10))], *pins), 100)
    assert most == Usage(num_input=3, num_written_5m=3, num_written_1h=4, num_output=10)


PRICE = st.integers(0, 10**6)
PINS = st.lists(st.builds(Pin, st.integers(0, 20), st.sampled_from([300.0, 3600.0])), max_size=3)


@given(st.builds(Prices, PRICE, PRICE, PRICE, PRICE, PRICE), PINS, st.data())
def test_no_split_of_a_prompt_costs_more_than_was_set_aside(
    prices: Prices, pins: list[Pin], data: st.DataObject
) -> None:
    request = request_of([list(range(20))], *pins)
    granted = data.draw(st.lists(st.sampled_from(pins), unique=True) if pins else st.just([]))
    num_any = data.draw(st.integers(0, 20))
    live = LivePins(num_any, data.draw(st.integers(0, num_any)))
    num_cached, num_output = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 10))
    got = ChoiceResult(
        20, True, live=live, granted=tuple(granted), num_cached_tokens=num_cached, num_output_tokens=num_output
    )
    store = EmbeddedAccounts(None, ManualClock())
    accounts = Accounts(store, prices, ManualClock())
    held = accounts.charge(new_key("k", 0)[0], "r", "m", most_usage(request, 100))
    asyncio.run(store.close())
    assert prices.cost_nanos(usage_of_results(request, [got])) <= held.charge.cost_nanos
