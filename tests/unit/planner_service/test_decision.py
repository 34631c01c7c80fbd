import json
import math

from tandem.planner_service.actuator import Action, ScalingOutcome
from tandem.planner_service.decision import ScalingDecision, as_json, error_ms
from tandem.planning.observation import Outlook
from tests.unit.planner_service.builders import D, Deployments, P, plan


def test_errors_are_only_between_two_figures() -> None:
    assert error_ms(300.0, 250.0) == 50.0
    assert error_ms(None, 250.0) is None
    assert error_ms(300.0, None) is None
    assert error_ms(300.0, math.inf) is None


def test_everything_can_be_written_as_json() -> None:
    hopeless = Outlook(ttft_ms=math.inf, tpot_ms=math.nan, prefill_use=1.2, decode_use=0.5, meets_slo=False)
    observed = Deployments(2, 3).observed("a gateway is away")
    action = Action(pool=P, num_before=1, num_planned=2, num_asked=2, outcome=ScalingOutcome.WRITTEN)
    decision = ScalingDecision(observed=observed, plan=plan(1, 2, now=hopeless), actions=(action,), is_leader=True)
    found = json.loads(json.dumps(as_json(decision), allow_nan=False))
    assert found["plan"]["now"] == {
        "ttft_ms": "inf",
        "tpot_ms": "nan",
        "prefill_use": 1.2,
        "decode_use": 0.5,
        "meets_slo": False,
    }
    assert found["actions"][0]["outcome"] == "written"
    assert found["observed"]["replicas"]["decode"]["num_wanted"] == 3


def test_a_decision_in_words() -> None:
    actions = (
        Action(pool=P, num_before=2, num_planned=2, num_asked=2, outcome=ScalingOutcome.UNCHANGED),
        Action(pool=D, num_before=2, num_planned=5, num_asked=2, outcome=ScalingOutcome.REFUSED, note="403"),
    )
    decision = ScalingDecision(observed=Deployments().observed(), plan=plan(2, 5), actions=actions, is_leader=True)
    assert decision.words == "prefill 2 (unchanged); decode 2 -> 5 (refused: 403); because"
