"""The simulated fleet against closed forms of queueing, and what it must never lose."""

import random
from dataclasses import dataclass, field

import pytest

from bench.scaling_rules import FixedPools
from tandem.fleet_simulation.cluster import Cluster
from tandem.fleet_simulation.result import SimulationResult
from tandem.planning.observation import Observation, Plan
from tandem.routing.admission import AdmissionLimits
from tandem.routing.snapshot import LinkState
from tandem.workload.arrivals import poisson
from tandem.workload.slo import Slo
from tandem.workload.trace import TraceRequest
from tests.unit.fleet_simulation.builders import INSTANT, SPEED, asked, setting


def _poisson(rate_per_s: float, num: int, num_prompt: int = 1000, num_output: int = 1) -> list[TraceRequest]:
    times = poisson(rate_per_s, random.Random(1))
    return [asked(next(times), num_prompt, num_output) for _ in range(num)]


def _mean_ttft_s(result: SimulationResult) -> float:
    waits = [served.ttft_s for served in result.served if served.ttft_s is not None]
    assert len(waits) == len(result.served)
    return sum(waits) / len(waits)


@dataclass
class Script:
    """Sizes by time; keeps what it was told."""

    sizes: dict[float, tuple[int, int]]
    seen: list[Observation] = field(default_factory=list)

    def plan(self, observation: Observation) -> Plan:
        self.seen.append(observation)
        at_s = max(at_s for at_s in self.sizes if at_s <= observation.now_s)
        return Plan(num_prefill=self.sizes[at_s][0], num_decode=self.sizes[at_s][1], reason="script")


def test_one_prefill_worker_is_an_m_d_1_queue() -> None:
    """Pollaczek-Khinchine: mean wait = use x service / (2 (1 - use))."""
    service_s, use = 0.1, 0.7
    result = Cluster(setting(report_s=0.1, interval_s=1e4), FixedPools(1, 1)).run(_poisson(use / service_s, 8000))
    expected_s = service_s + use * service_s / (2 * (1 - use))
    assert _mean_ttft_s(result) == pytest.approx(expected_s, rel=0.06)


def test_two_prefill_workers_wait_less_than_one_twice_as_fast_serves_more() -> None:
    """M/D/2 at the same use: the mean wait lies between the pooled bound and two separate queues."""
    service_s, use = 0.1, 0.7
    fleet = setting(num_prefill=2, report_s=0.1, interval_s=1e4)
    wait_s = _mean_ttft_s(Cluster(fleet, FixedPools(2, 1)).run(_poisson(2 * use / service_s, 8000))) - service_s
    separate_s = use * service_s / (2 * (1 - use))
    assert 0.4 * separate_s < wait_s < 0.65 * separate_s


def test_decode_keeps_littles_law() -> None:
    """Requests running = arrivals x time in decode; who arrives finds that many, and lengthens their steps itself."""
    rate, num_output = 5.0, 101
    script = Script({0.0: (1, 1)})
    result = Cluster(setting(interval_s=2.0), script).run(_poisson(rate, 3000, 100, num_output))
    times_s = [served.tpot_s for served in result.served if served.tpot_s is not None]
    running = [seen.decode.num_running for seen in script.seen[10:-10]]
    mean_s = sum(times_s) / len(times_s)
    assert sum(running) / len(running) == pytest.approx(rate * mean_s * (num_output - 1), rel=0.05)
    tokens_per_ms = rate * (num_output - 1) / 1000
    growth = SPEED.decode.ms_per_request + SPEED.decode.ms_per_context_token * 150
    assert 1000 * mean_s == pytest.approx((10.0 + growth) / (1 - tokens_per_ms * growth), rel=0.03)


def test_no_request_is_lost_while_pools_change() -> None:
    script = Script({0.0: (3, 3), 20.0: (1, 1), 40.0: (4, 2), 60.0: (2, 4), 90.0: (1, 1)})
    slow = LinkState(20_000.0, 5.0)
    fleet = setting(num_prefill=3, num_decode=3, startup_s=15.0, interval_s=5.0, link=slow, block_bytes=16)
    result = Cluster(fleet, script).run(_poisson(6.0, 800, 1000, 60))
    report = result.report(Slo(10.0, 1.0))
    assert (report.num_completed, report.num_failed, report.num_rejected) == (800, 0, 0)
    assert max(size.prefill_alive for size in result.sizes) == 4


def test_a_prefill_worker_that_drains_waits_for_its_pulls() -> None:
    """Its prompt ends at 0.1 s, its last chunk is pulled for 16 s more."""
    slow = LinkState(1000.0, 0.0)
    fleet = setting(num_prefill=2, interval_s=1.0, link=slow, block_bytes=16, block_size=1)
    script = Script({0.0: (2, 1), 2.0: (1, 1)})
    result = Cluster(fleet, script).run([asked(0.0, 1000, 30), asked(0.01, 1000, 500)])
    alive = {size.at_s: size.prefill_alive for size in result.sizes}
    assert (alive[3.0], alive[15.0], alive[18.0]) == (2, 2, 1)
    assert all(served.completed for served in result.served)


def test_prefixes_are_reused_and_observed() -> None:
    ids = tuple(range(100))
    script = Script({0.0: (1, 1)})
    result = Cluster(setting(), script).run([asked(0.0, 1601, 2, ids), asked(1.0, 1601, 2, ids), asked(11.0, 10, 2)])
    ttfts_s = [served.ttft_s for served in result.served]
    assert ttfts_s[:2] == [pytest.approx(0.1601), pytest.approx(0.0001)]
    assert script.seen[0].traffic.num_cached_tokens == 1600


def test_full_memory_and_long_queues_are_refused_and_counted() -> None:
    fleet = setting(decode_kv_tokens=3200)
    result = Cluster(fleet, Script({0.0: (1, 1)})).run([asked(0.01 * i, 1000, 400) for i in range(6)])
    report = result.report(Slo(10.0, 1.0))
    assert (report.num_completed, report.num_rejected) == (2, 4)
    hasty = setting(limits=AdmissionLimits(max_ttft_ms=150.0, max_local_tokens=0))
    late = Cluster(hasty, FixedPools(1, 1)).run([asked(0.001 * i, 1000, 2) for i in range(4)]).report(Slo(10.0, 1.0))
    assert (late.num_completed, late.num_rejected) == (2, 2), "the second is computed by decode, as a last resort"


def test_short_prompts_are_computed_by_decode() -> None:
    fleet = setting(limits=AdmissionLimits(max_local_tokens=512), link=LinkState(1e3, 100.0))
    result = Cluster(fleet, FixedPools(1, 1)).run([asked(0.0, 100, 5), asked(5.0, 2000, 5)])
    assert [served.ttft_s for served in result.served] == [pytest.approx(0.01), pytest.approx(0.2)]


def test_accelerators_count_from_the_asking_to_the_going() -> None:
    """A replica asked for at 10 s and given up at 30 s costs 20 s, though it was never ready."""
    script = Script({0.0: (1, 1), 10.0: (2, 1), 30.0: (1, 1)})
    fleet = setting(startup_s=60.0, prefill_accelerators=4, link=INSTANT)
    result = Cluster(fleet, script).run([asked(0.0, 1000, 2), asked(99.9, 1000, 2)])
    assert result.prefill_accelerator_s == pytest.approx(4 * (result.duration_s + 20.0))
    assert result.decode_accelerator_s == pytest.approx(result.duration_s)
    assert result.num_changes == 2
    starting_s = [list(seen.prefill.starting_s) for seen in script.seen[:4]]
    assert starting_s == [[], [10.0], [20.0], []], "seen at 10, 20, 30 and 40 s"


def test_an_observation_counts_its_window_only() -> None:
    script = Script({0.0: (1, 1)})
    Cluster(setting(), script).run([asked(1.0, 1000, 2), asked(2.0, 500, 2), asked(11.0, 100, 3), asked(31.0, 7, 2)])
    first, second = script.seen[0].traffic, script.seen[1].traffic
    assert (first.num_requests, first.num_prompt_tokens, first.num_output_tokens) == (2, 1500, 4)
    assert (second.num_requests, second.num_prompt_tokens, second.num_output_tokens) == (1, 100, 3)
    assert script.seen[2].ttft_ms is None
    assert first.duration_s == 10.0
    assert first.variation == pytest.approx(250 / 750)
