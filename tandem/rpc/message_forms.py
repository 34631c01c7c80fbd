"""The wire conversions (`form.Form`) of all values sent between processes, and the checks of their fields.

`methods` pairs them with the remote methods.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.core.draft_counts import DraftCounts
from tandem.core.errors import InvalidRequestError
from tandem.core.events import BlockEvent
from tandem.core.expert_rows import ExpertRows
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import MAX_PINS, Pin
from tandem.core.process_usage import ProcessUsage
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.kvcache.block_table import BlockRange
from tandem.locality.base import PublishResult
from tandem.routing.queue_place import QueuePlace
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc import messages, serve_messages
from tandem.rpc.block_messages import BlockReport, BlockSnapshot
from tandem.rpc.derive import Forms
from tandem.rpc.form import not_empty, not_negative, token_id, token_ids
from tandem.rpc.hand_forms import BLOCK_EVENT, TOKEN_LOGPROBS, serve_update_form
from tandem.rpc.kinds import FieldRule
from tandem.rpc.prefill_messages import ChosenToken, LeasedDraftState
from tandem.rpc.prompt_messages import NamedPrompt
from tandem.rpc.rank_messages import RankReport
from tandem.rpc.v1 import common_pb2, router_pb2, worker_pb2

MAX_DECISIONS = 4096  # that one call may ask for
_MIN_INTERVAL_S = 0.001
_MAX_INTERVAL_S = 3600.0
_ASSUMED_AGE_S = 0.25  # NOTE: assumed age of the figures of a worker that does not state it; older ones are unusual


def _few_pins(field: str, pins: Sequence[Any]) -> Sequence[Any]:
    if len(pins) > MAX_PINS:
        raise InvalidRequestError(f"{field} has {len(pins)} entries; at most {MAX_PINS} are accepted")
    return pins


def _interval(field: str, value: float) -> float:
    if not _MIN_INTERVAL_S <= value <= _MAX_INTERVAL_S:
        raise InvalidRequestError(f"{field}={value} cannot be kept; use {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S} seconds")
    return value


def _num_latest(field: str, value: int) -> int:
    if not 1 <= value <= MAX_DECISIONS:
        raise InvalidRequestError(f"{field}={value} is out of range; use 1 to {MAX_DECISIONS}")
    return value


def _of_known_role(role_of: Callable[[Any], int]) -> FieldRule:
    """Skips entries of a list whose role this release does not know. NOTE: only newer releases use such workers."""
    return FieldRule(keep=lambda message: role_of(message) in _ROLES)


_ROLES = frozenset(common_pb2.Role.values()) - {common_pb2.ROLE_UNSPECIFIED}
_NAMED, _AMOUNT = FieldRule(check=not_empty), FieldRule(check=not_negative)
_TOKEN_IDS, _PINS = FieldRule(check=token_ids), FieldRule(check=_few_pins)
_RESULT = FieldRule(newer=PublishResult.RESYNC)

_forms = Forms()

# --- parts -----------------------------------------------------------------------------------------------------------

_forms.enter(TokenLogprobs, TOKEN_LOGPROBS)
_forms.enter(BlockEvent, BLOCK_EVENT)
_forms.add(messages.WorkerAddress, common_pb2.WorkerAddress, worker_id=_NAMED)
_forms.add(CacheScope, common_pb2.CacheScope)
_forms.add(NamedPrompt, common_pb2.ToldPrompt)
_forms.add(messages.ModelInfo, common_pb2.ModelInfo)
_forms.add(PrefillWork, common_pb2.PrefillWork, num_requests=_AMOUNT, num_tokens=_AMOUNT, num_pairs=_AMOUNT)
_forms.add(
    WorkerState,
    common_pb2.WorkerState,
    worker_id=_NAMED,
    figures_age_s=FieldRule(check=not_negative, if_absent=_ASSUMED_AGE_S),
)
_forms.add(messages.LinkReport, common_pb2.LinkReport, source_id=_NAMED, bytes_per_s=_AMOUNT, latency_s=_AMOUNT)
_forms.add(messages.PrefillSample, common_pb2.PrefillSample, duration_s=_AMOUNT)
_forms.add(messages.StepSample, common_pb2.StepSample, duration_s=_AMOUNT)
_forms.add(DraftCounts, common_pb2.DraftCounts)
_forms.add(ExpertRows, common_pb2.ExpertRows)
_forms.add(RankReport, common_pb2.RankReport)
_forms.add(ProcessUsage, common_pb2.ProcessUsage, cpu_cores=_AMOUNT)
_forms.add(
    messages.WorkerStatus,
    common_pb2.WorkerStatus,
    lifecycle=FieldRule(newer="draining"),  # NOTE: what it runs goes on, and it is given nothing new
)
_forms.add(Reasoning, worker_pb2.Reasoning)
_forms.add(SamplingParams, worker_pb2.SamplingParams)
_forms.add(Pin, worker_pb2.Pin)
_forms.add(Stage, worker_pb2.Stage)
_forms.add(RequestMetrics, worker_pb2.RequestMetrics, pins=_PINS)
_forms.add(
    RequestOutput,
    worker_pb2.RequestOutput,
    token_ids=_TOKEN_IDS,
    finish_reason=FieldRule(newer=FinishReason.STOP),
)
_forms.add(BlockRange, worker_pb2.BlockRange)
_forms.add(messages.LeaseUpdate, worker_pb2.LeaseUpdate, ttl_s=_AMOUNT)
_forms.add(LeasedDraftState, worker_pb2.LeasedDraftState)
_forms.add(ChosenToken, worker_pb2.ChosenToken, token_id=FieldRule(check=token_id))
_forms.add(messages.Greeting, worker_pb2.Greeting)
_forms.add(messages.WorkerRecord, router_pb2.WorkerRecord)
_forms.add(messages.Decision, router_pb2.Decision)
_forms.add(messages.WorkerListing, router_pb2.WorkerListing)
_forms.add(serve_messages.RequestStart, worker_pb2.RequestStart)
_forms.add(serve_messages.Credit, worker_pb2.Credit)
_forms.add(serve_messages.CallStatus, worker_pb2.CallStatus)

# --- what a worker is asked, and answers ------------------------------------------------------------------------------

WATCH_CALL = _forms.inside(float, worker_pb2.WatchRequest, FieldRule(check=_interval))
STATUS = _forms.inside(messages.WorkerStatus, worker_pb2.StatusResponse)
WATCHED_STATUS = _forms.inside(messages.WorkerStatus, worker_pb2.WatchResponse)
GENERATE_CALL = _forms.add(messages.GenerateCall, worker_pb2.GenerateRequest, request_id=_NAMED, pins=_PINS)
GENERATE_UPDATE = _forms.add(messages.GenerateUpdate, worker_pb2.GenerateResponse)
SERVE_CALL = _forms.add(serve_messages.ServeCall, worker_pb2.ServeRequest)
SERVE_UPDATE = serve_update_form(_forms.add(serve_messages.OtherUpdate, worker_pb2.OtherUpdate))
PREFILL_CALL = _forms.add(messages.PrefillCall, worker_pb2.PrefillRequest, request_id=_NAMED, pins=_PINS)
PREFILL_UPDATE = _forms.add(messages.PrefillUpdate, worker_pb2.PrefillResponse, pins=_PINS)
GREET_CALL = _forms.inside(messages.Greeting, worker_pb2.GreetRequest)
GREET_ANSWER = _forms.inside(messages.Greeting, worker_pb2.GreetResponse)
LEASE_CALL = _forms.add(messages.LeaseCall, worker_pb2.LeaseRequest, lease_id=_NAMED)
LEASE_ANSWER = _forms.inside(messages.LeaseUpdate, worker_pb2.LeaseResponse)
RENEW_CALL = _forms.inside(Sequence[str], worker_pb2.RenewRequest)
RENEW_ANSWER = _forms.inside(Sequence[str], worker_pb2.RenewResponse)
CONFIRM_CALL = _forms.add(messages.ConfirmCall, worker_pb2.ConfirmRequest, lease_id=_NAMED)
CONFIRM_ANSWER = _forms.add(messages.ConfirmAnswer, worker_pb2.ConfirmResponse)
RELEASE_CALL = _forms.inside(Sequence[str], worker_pb2.ReleaseRequest)

# --- what a router is asked, and answers ------------------------------------------------------------------------------

_forms.add(QueuePlace, router_pb2.QueuePlace)
PAIR_CALL = _forms.add(messages.PairCall, router_pb2.PairRequest, request_id=_NAMED)
PAIRING = _forms.add(messages.PairingAnswer, router_pb2.PairResponse, decision_s=_AMOUNT)
SETTLEMENT = _forms.add(Settlement, router_pb2.SettleRequest, request_id=_NAMED)
PROCESS = _forms.add(messages.ProcessInfo, router_pb2.DescribeResponse)
MODELS = _forms.inside(Sequence[messages.ModelInfo], router_pb2.ModelsResponse)
LISTINGS = _forms.inside(
    Sequence[messages.WorkerListing], router_pb2.WorkersResponse, _of_known_role(lambda one: one.status.state.role)
)
DECISIONS_CALL = _forms.inside(int, router_pb2.DecisionsRequest, FieldRule(check=_num_latest))
DECISIONS = _forms.inside(Sequence[messages.Decision], router_pb2.DecisionsResponse)
REGISTRATION = _forms.add(messages.Registration, router_pb2.RegisterRequest)
RECORDS = _forms.inside(
    Sequence[messages.WorkerRecord], router_pb2.RegisterResponse, _of_known_role(lambda one: one.role)
)
UNREGISTER_CALL = _forms.inside(messages.WorkerRecord, router_pb2.UnregisterRequest)
REPORT = _forms.add(BlockReport, router_pb2.PublishRequest, worker_id=_NAMED)
PUBLISH_ANSWER = _forms.inside(PublishResult, router_pb2.PublishResponse, _RESULT)
SNAPSHOT = _forms.add(BlockSnapshot, router_pb2.ReplaceRequest, worker_id=_NAMED)
REPLACE_ANSWER = _forms.inside(PublishResult, router_pb2.ReplaceResponse, _RESULT)
