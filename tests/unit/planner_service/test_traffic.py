import pytest

from tandem.planner_service.gateway_counts import GatewayCounts
from tandem.planner_service.traffic import FORGET_S, TrafficMeter, TrafficWindow
from tests.unit.planner_service.gateways import FakeGateway

BORN_S = 1_000.0


def counted(num_arrivals: float, born_s: float | None = BORN_S) -> GatewayCounts:
    return GatewayCounts(born_s=born_s, num_arrivals=num_arrivals, num_arrived_tokens=100 * num_arrivals)


class Meter:
    """A meter looked at every 10 s; its wall clock began at `BORN_S` + 100."""

    def __init__(self) -> None:
        self.meter = TrafficMeter()
        self.now_s = 0.0

    def update(self, after_s: float = 10.0, /, **counts: GatewayCounts) -> TrafficWindow | None:
        self.now_s += after_s
        return self.meter.update(self.now_s, BORN_S + 100 + self.now_s, counts)

    def num_requests(self, **counts: GatewayCounts) -> int | None:
        window = self.update(**counts)
        return None if window is None else window.traffic.num_requests


def test_traffic_is_what_came_between_two_looks() -> None:
    meter, gateway = Meter(), FakeGateway()
    gateway.serve(num_prompt=9999)
    assert meter.update(a=gateway.counts()) is None
    for _ in range(3):
        gateway.serve(num_prompt=200, num_cached=50, num_output=11, ttft_s=0.3, tpot_s=0.01)
    gateway.arrive(400)
    window = meter.update(a=gateway.counts())
    assert window is not None
    traffic = window.traffic
    assert (traffic.duration_s, traffic.num_requests, traffic.num_prompt_tokens) == (10.0, 4, 1000)
    assert traffic.num_cached_tokens == 250  # NOTE: a quarter, as of those that ended
    assert (traffic.num_finished, traffic.num_output_tokens, traffic.num_rejected) == (3, 33, 0)
    assert window.ttft.mean == pytest.approx(0.3)
    assert window.tpot.mean == pytest.approx(0.01)


def test_while_nothing_ends_prefixes_are_found_as_before() -> None:
    """A wave of long answers was taken for one without prefix hits, all of its prompts to be computed."""
    meter, gateway = Meter(), FakeGateway()
    meter.update(a=gateway.counts())
    gateway.serve(num_prompt=200, num_cached=150)
    meter.update(a=gateway.counts())
    gateway.arrive(1000)
    window = meter.update(a=gateway.counts())
    assert window is not None
    assert (window.traffic.num_prompt_tokens, window.traffic.num_cached_tokens) == (1000, 750)
    gateway.serve(num_prompt=400)
    window = meter.update(a=gateway.counts())
    assert window is not None
    assert (window.traffic.num_prompt_tokens, window.traffic.num_cached_tokens) == (400, 0)


def test_a_quiet_window_is_traffic_of_nothing() -> None:
    meter = Meter()
    meter.update(a=counted(5))
    window = meter.update(a=counted(5))
    assert window is not None
    assert (window.traffic.num_requests, window.traffic.num_prompt_tokens, window.ttft.mean) == (0, 0, None)


def test_what_was_refused_is_demand_and_counts_once() -> None:
    meter, gateway = Meter(), FakeGateway()
    meter.update(a=gateway.counts())
    gateway.serve(num_prompt=100)
    gateway.refuse(300)
    gateway.turn_away()
    gateway.turn_away()
    gateway.turn_away("invalid_value")
    window = meter.update(a=gateway.counts())
    assert window is not None
    assert (window.traffic.num_requests, window.traffic.num_rejected) == (4, 3)
    assert window.traffic.num_prompt_tokens == 800  # NOTE: those turned away are taken to be as long as the others


def test_refused_choices_hide_no_calls_that_were_turned_away() -> None:
    """Ten calls for eight choices each made sixty others vanish that never became choices."""
    meter, gateway = Meter(), FakeGateway()
    meter.update(a=gateway.counts())
    for _ in range(10):
        gateway.refuse(num_choices=8)
    for _ in range(60):
        gateway.turn_away()
    window = meter.update(a=gateway.counts())
    assert window is not None
    assert (window.traffic.num_requests, window.traffic.num_rejected) == (140, 70)


def test_a_gateway_that_appears_is_no_burst() -> None:
    meter = Meter()
    meter.update(a=counted(10))
    assert meter.num_requests(a=counted(12), b=counted(5000)) == 2
    assert meter.num_requests(a=counted(14), b=counted(5003)) == 5


def test_a_gateway_that_vanishes_takes_nothing_back() -> None:
    meter = Meter()
    meter.update(a=counted(10), b=counted(20))
    assert meter.num_requests(a=counted(12)) == 2
    assert meter.num_requests(a=counted(13)) == 1


def test_a_restarted_gateway_counts_from_its_start() -> None:
    meter = Meter()
    meter.update(a=counted(1000))
    assert meter.num_requests(a=counted(7, born_s=BORN_S + 113)) == 7
    assert meter.num_requests(a=counted(9, born_s=BORN_S + 113)) == 2


def test_a_restart_is_noticed_even_when_it_has_counted_further_than_before() -> None:
    meter = Meter()
    meter.update(a=counted(3))
    assert meter.num_requests(a=counted(50, born_s=BORN_S + 113)) == 50


def test_a_restart_of_one_that_does_not_say_when_it_was_born() -> None:
    meter = Meter()
    meter.update(a=counted(1000, born_s=None))
    assert meter.num_requests(a=counted(7, born_s=None)) == 7


def test_an_older_gateway_at_the_same_address_is_no_burst() -> None:
    """Behind one address of several gateways each answer is another's."""
    meter = Meter()
    meter.update(a=counted(10))
    assert meter.num_requests(a=counted(9000, born_s=BORN_S + 50)) is None
    assert meter.num_requests(a=counted(9004, born_s=BORN_S + 50)) == 4


def test_what_was_counted_while_nobody_could_ask_is_spread_over_that_time() -> None:
    meter = Meter()
    meter.update(a=counted(0), b=counted(0))
    assert meter.num_requests(b=counted(10)) == 10
    assert meter.num_requests(b=counted(20)) == 10
    assert meter.num_requests(a=counted(30), b=counted(30)) == 20


def test_after_an_outage_of_everything_the_rate_is_that_of_the_outage() -> None:
    meter = Meter()
    meter.update(a=counted(0))
    assert meter.update() is None
    assert meter.update() is None
    window = meter.update(a=counted(30))
    assert window is not None
    assert window.traffic.num_requests / window.traffic.duration_s == pytest.approx(1.0)


def test_a_gateway_away_for_long_is_forgotten() -> None:
    meter = Meter()
    meter.update(a=counted(0), b=counted(0))
    meter.update(FORGET_S + 1, b=counted(0))
    assert meter.num_requests(a=counted(900), b=counted(1)) == 1


def test_latencies_of_two_gateways_are_weighed_by_their_requests() -> None:
    meter, quick, slow = Meter(), FakeGateway(), FakeGateway()
    meter.update(a=quick.counts(), b=slow.counts())
    for _ in range(3):
        quick.serve(ttft_s=0.1)
    slow.serve(ttft_s=0.5)
    window = meter.update(a=quick.counts(), b=slow.counts())
    assert window is not None
    assert window.ttft.mean == pytest.approx(0.2)
