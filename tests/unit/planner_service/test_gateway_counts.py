import pytest

from tandem.core.errors import UnavailableError
from tandem.planner_service.gateway_counts import GatewayCounts, parse_counts
from tests.unit.planner_service.gateways import FakeGateway


def test_a_real_gateways_counters_are_understood() -> None:
    gateway = FakeGateway()
    gateway.serve(num_prompt=100, num_cached=64, num_output=11, ttft_s=0.2, tpot_s=0.02)
    gateway.serve(num_prompt=300, num_output=1)
    gateway.arrive(50)
    gateway.refuse(70)
    gateway.turn_away()
    gateway.turn_away("invalid_value")
    counts = gateway.counts()
    assert counts.born_s is not None
    assert (counts.num_arrivals, counts.num_arrived_tokens) == (4, 520)
    assert (counts.num_ended, counts.num_output_tokens) == (2, 12)
    assert (counts.num_refused, counts.num_turned_away) == (2, 1)
    assert (counts.num_looked_up_tokens, counts.num_cached_tokens) == (400, 64)
    assert counts.ttft.mean == pytest.approx(0.2)
    assert counts.tpot.mean == pytest.approx(0.02)
    assert counts.tpot.num_samples == 1


def test_two_lives_are_told_apart() -> None:
    first, second = FakeGateway(), FakeGateway()
    assert second.counts().began_anew_after(first.counts())
    assert not first.counts().began_anew_after(first.counts())


def test_without_a_date_of_birth_a_fall_tells_a_new_life() -> None:
    assert GatewayCounts(num_arrivals=1).began_anew_after(GatewayCounts(num_arrivals=2))
    assert not GatewayCounts(num_arrivals=2).began_anew_after(GatewayCounts(num_arrivals=1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "tandem_router_decisions_total 5.0",
        "tandem_gateway_arrivals_total NaN",
        "tandem_gateway_arrivals_total -1",
        "tandem_gateway_arrivals_total many",
        'tandem_gateway_arrivals_total 1\nvllm:time_to_first_token_seconds_bucket{x="1"} 2',
        'tandem_gateway_arrivals_total 1\nvllm:time_to_first_token_seconds_bucket{le="1"} 2',
        "<html>\x00\xff",
    ],
)
def test_what_is_no_gateway_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UnavailableError, match="its /metrics cannot be read"):
        parse_counts(text)
