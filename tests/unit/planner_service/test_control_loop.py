import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.clock import ManualClock
from tandem.planner_service.actuator import Actuator
from tandem.planner_service.control_loop import ControlLoop
from tandem.planner_service.metrics import PlannerMetrics
from tandem.planner_service.observer import ClusterObservation, MeasuredLatency
from tandem.planning.observation import Observation, Outlook, Plan
from tests.unit.planner_service.builders import Deployments, Throne, bounds, plan

GOOD = Outlook(ttft_ms=200.0, tpot_ms=20.0, prefill_use=0.5, decode_use=0.6, meets_slo=True)


class Script:
    """A policy and an observer: each round takes the next of both."""

    def __init__(self, deployments: Deployments, plans: Sequence[Plan]) -> None:
        self.deployments = deployments
        self.plans = list(plans)
        self.problems: tuple[str, ...] = ()
        self.is_blind = False
        self.ttft = MeasuredLatency()
        self.planned: list[Observation] = []

    async def observe(self) -> ClusterObservation:
        observed = replace(self.deployments.observed(*self.problems), ttft=self.ttft)
        return replace(observed, observation=None) if self.is_blind else observed

    def plan(self, observation: Observation) -> Plan:
        self.planned.append(observation)
        return self.plans.pop(0)


class Stage:
    """A loop over a script, acting as the leader."""

    def __init__(self, *plans: Plan) -> None:
        self.deployments = Deployments(2, 2)
        self.script = Script(self.deployments, plans)
        self.clock = ManualClock()
        self.metrics = PlannerMetrics()
        throne = Throne()
        actuator = Actuator(self.deployments, throne, bounds(), self.clock, acts=True, yield_s=60.0)
        self.loop = ControlLoop(
            self.script, self.script, actuator, throne, self.metrics, self.clock, interval_s=10.0, mode="act"
        )

    def round(self) -> None:
        asyncio.run(self.loop.round())

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"tandem_planner_{name}", labels)


def test_a_round_looks_plans_acts_and_tells() -> None:
    stage = Stage(plan(2, 4, now=GOOD, then=replace(GOOD, decode_use=0.3)))
    stage.script.ttft = MeasuredLatency(mean_ms=100.0, share_ms=260.0)
    stage.round()
    assert len(stage.deployments.written) == 1
    assert stage.value("replicas_wanted", pool="decode") == 4
    assert stage.value("replicas_asked", pool="decode") == 4
    assert stage.value("replicas_ready", pool="decode") == 2
    assert stage.value("predicted_ms", latency="ttft", replicas="now") == 200
    assert stage.value("predicted_use", pool="decode") == 0.3
    assert stage.value("measured_ms", latency="ttft") == 260
    assert stage.value("measured_mean_ms", latency="ttft") == 100
    assert stage.value("leader") == 1
    assert stage.value("requests_per_second") == 2
    assert stage.value("decisions_total", pool="decode", change="grow", outcome="written") == 1
    assert stage.value("decisions_total", pool="prefill", change="stay", outcome="unchanged") == 1
    page = stage.loop.page()
    assert page["plan"]["reason"] == "because"  # type: ignore[index]
    assert page["measured"]["ttft"]["share_ms"] == 260.0  # type: ignore[index]
    assert page["observation"]["decode"]["num_ready"] == 2  # type: ignore[index]


def test_what_was_predicted_is_held_against_what_came() -> None:
    stage = Stage(plan(2, 2, now=GOOD), plan(2, 2, now=replace(GOOD, ttft_ms=250.0)))
    stage.round()
    assert stage.value("prediction_error_ms", latency="ttft") is None
    stage.script.ttft = MeasuredLatency(mean_ms=100.0, share_ms=260.0)
    stage.round()
    assert stage.value("prediction_error_ms", latency="ttft") == 60
    assert stage.value("prediction_error_ms", latency="tpot") is None


def test_a_blind_round_plans_nothing_and_the_last_plan_stays_to_be_seen() -> None:
    stage = Stage(plan(2, 4))
    stage.round()
    stage.script.is_blind, stage.script.problems = True, ("no decode worker is seen to be ready",)
    stage.round()
    assert len(stage.script.planned) == 1
    assert stage.value("problems") == 1
    assert stage.value("looks_total", result="blind") == 1
    page = stage.loop.page()
    assert (page["problems"], page["plan"]["num_decode"]) == (["no decode worker is seen to be ready"], 4)  # type: ignore[index]


def test_before_the_first_plan_the_page_says_so() -> None:
    assert Stage().loop.page() == {"mode": "act", "is_leader": True, "problems": [], "plan": None}


def test_another_decision_is_said_aloud_and_the_same_one_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(plan(2, 4), plan(2, 4), plan(2, 4), plan(2, 4, warnings=("the budget is too small",)))
    with caplog.at_level(logging.INFO):
        stage.round()
        assert [record.getMessage() for record in caplog.records] == [
            "prefill 2 (unchanged); decode 2 -> 4 (written); because"
        ]
        assert caplog.records[0].__dict__["outcomes"] == "unchanged,written"
        caplog.clear()
        stage.round()
        assert len(caplog.records) == 1
        stage.round()
        assert len(caplog.records) == 1
        stage.round()
        assert caplog.records[-1].__dict__["warnings"] == "the budget is too small"


def test_a_problem_is_said_once_while_it_lasts_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(*[plan(2, 2)] * 4)
    with caplog.at_level(logging.INFO):
        stage.round()
        caplog.clear()
        stage.script.problems = ("a gateway is away",)
        stage.round()
        stage.round()
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", "a gateway is away")
        ]
        stage.script.problems = ()
        stage.round()
        assert caplog.records[-1].getMessage() == "everything is seen again"


def test_health_tells_when_rounds_no_longer_come() -> None:
    stage = Stage(plan(2, 2))
    stage.round()
    status, body = stage.loop.health()
    assert (status, body["status"], body["is_leader"], body["has_plan"]) == (200, "ok", True, True)
    stage.clock.advance(89.0)
    assert stage.loop.health()[0] == 200
    stage.clock.advance(2.0)
    status, body = stage.loop.health()
    assert (status, body["status"]) == (503, "stuck")
