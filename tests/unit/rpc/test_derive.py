"""A class that does not say what its message says is refused at import; a value that cannot be sent is named."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from enum import Enum
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.timeline import Stage
from tandem.rpc import methods
from tandem.rpc.derive import Forms
from tandem.rpc.form import not_empty
from tandem.rpc.kinds import FieldRule
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.serve_messages import Credit
from tandem.rpc.v1 import common_pb2, router_pb2, worker_pb2
from tests.unit.rpc.examples import GENERATE, GREETING, OUTPUT, PAIR, PAIRING, STATUS


def declared(**kinds: Any) -> type[Any]:
    return make_dataclass("Declared", kinds.items())


class Incomplete(Enum):
    """One result fewer than the message has."""

    APPLIED = 1
    STALE = 2


MISFITS = [
    (declared(num_tokens=int), worker_pb2.Pin, r"Declared has no field \['ttl_s'\], which tandem.rpc.v1.Pin has"),
    (declared(num_tokens=int, ttl_s=float, name=str), worker_pb2.Pin, "Pin.name, which does not exist"),
    (declared(num_tokens=float, ttl_s=float), worker_pb2.Pin, "'float'> has no form as tandem.rpc.v1.Pin.num_tokens"),
    (declared(num_tokens=int | None, ttl_s=float), worker_pb2.Pin, "Pin.num_tokens, which is not optional"),
    (declared(memory_bytes=int, cpu_cores=float), common_pb2.ProcessUsage, "cpu_cores, which is optional"),
    (declared(first_index=int, block_ids=int), worker_pb2.BlockRange, "the list .*block_ids"),
    (declared(first_index=int, block_ids=tuple[str, ...]), worker_pb2.BlockRange, "block_ids"),
    (declared(work=Credit, duration_s=float), common_pb2.PrefillSample, "PrefillSample.work, a PrefillWork"),
    (declared(work=Stage, duration_s=float), common_pb2.PrefillSample, "Stage.*PrefillWork"),
    (declared(code=int, details=str, trailing=Mapping[str, float]), worker_pb2.CallStatus, "the map .*trailing"),
    (declared(code=int, details=str, trailing=tuple[str, ...]), worker_pb2.CallStatus, "the map .*trailing"),
    (declared(reader=Credit, lease_id=str, block_hashes=int), worker_pb2.LeaseRequest, "reader, a WorkerAddress"),
    (declared(lease_ids=Sequence[int]), worker_pb2.RenewRequest, "lease_ids"),
    (declared(result=Incomplete), router_pb2.PublishResponse, "PublishResult of .*RESYNC"),
    (declared(value=str | int), worker_pb2.Attribute, "Attribute.value"),
]


@pytest.mark.parametrize(("value_type", "message_type", "words"), MISFITS)
def test_declarations_that_contradict_each_other_are_refused(value_type: Any, message_type: Any, words: str) -> None:
    forms = Forms()
    forms.add(Credit, worker_pb2.Credit)
    with pytest.raises(TypeError, match=words):
        forms.add(value_type, message_type)


def test_a_rule_for_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Credit has no field \['name'\]"):
        Forms().add(Credit, worker_pb2.Credit, name=FieldRule(check=not_empty))


def test_what_is_not_all_of_a_message_is_not_its_inside() -> None:
    with pytest.raises(TypeError, match="Credit"):
        Forms().inside(int, worker_pb2.Credit)
    with pytest.raises(TypeError, match="RenewRequest"):
        Forms().inside(None, worker_pb2.RenewRequest)


def test_a_class_of_its_own_names_gets_a_form() -> None:
    """With what only a default and only a rule can say."""

    @dataclass(frozen=True)
    class Usage:
        memory_bytes: int
        cpu_cores: float = 0.5

    told = common_pb2.ProcessUsage(memory_bytes=3).SerializeToString()
    assert Forms().add(Usage, common_pb2.ProcessUsage).decode(told) == Usage(3, 0.5)
    ruled = Forms().add(Usage, common_pb2.ProcessUsage, cpu_cores=FieldRule(if_absent=0.25))
    assert ruled.decode(told) == Usage(3, 0.25)
    assert ruled.decode(ruled.encode(Usage(3, 0.0))) == Usage(3, 0.0)


ANYTHING: Any = 1.5
UNSENDABLE: list[tuple[Any, Any, str]] = [
    (methods.GENERATE.request, replace(GENERATE, priority=2**63), f"GenerateRequest.priority={2**63} cannot be sent"),
    (methods.GENERATE.request, replace(GENERATE, prompt_token_ids=(1, -1)), r"prompt_token_ids=\(1, -1\) cannot be"),
    (methods.GENERATE.request, replace(GENERATE, request_id="\ud800"), r"request_id='\\ud800' cannot be sent"),
    (methods.PAIR.request, replace(PAIR, num_expected_output=-1), "num_expected_output=-1 cannot be sent"),
    (methods.PAIR.request, replace(PAIR, excluded=(ANYTHING,)), r"excluded=\(1.5,\) cannot be sent"),
    (
        methods.GREET.request,
        replace(GREETING, site={"a": ANYTHING}),
        r"site=\{'a': 1.5\} cannot be sent: value=1.5 is none",
    ),
    (methods.STATUS.answer, replace(STATUS, lifecycle="asleep"), "lifecycle='asleep' is unknown; use one of"),
    (methods.STATUS.answer, replace(STATUS, blocks={"free": -1}), r"WorkerStatus.blocks=\{'free': -1\} cannot be sent"),
    (
        methods.GENERATE.answer,
        GenerateUpdate(replace(OUTPUT, stop_reason=ANYTHING)),
        "RequestOutput.stop_reason=1.5 cannot be sent: stop_reason=1.5 is none of",
    ),
]


@pytest.mark.parametrize(("form", "value", "words"), UNSENDABLE)
def test_what_cannot_be_sent_is_named(form: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        form.encode(value)


def test_an_entry_that_is_not_finite_is_named_by_its_key() -> None:
    told = methods.PAIR.answer.encode(replace(PAIRING, predicted_ms={"ttft": math.inf, "queue": 1.0}))
    with pytest.raises(InvalidRequestError, match=r"predicted_ms\['ttft'\]=inf must be a finite number"):
        methods.PAIR.answer.decode(told)
    stage = Stage("fetch", "d0", 1.0, 0.0, {"gb_per_s": math.nan})
    told = methods.GENERATE.answer.encode(GenerateUpdate(OUTPUT, (stage,)))
    with pytest.raises(InvalidRequestError, match="nan must be a finite number"):
        methods.GENERATE.answer.decode(told)
