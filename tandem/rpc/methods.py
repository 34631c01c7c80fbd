"""Table of every remote method: its name on the wire, and the conversions (`form.Form`) of its request and its answer.

`client` and `server` both use this table, so they cannot disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from tandem.core.errors import InvalidRequestError
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.rpc import message_forms as forms
from tandem.rpc.block_messages import BlockReport, BlockSnapshot
from tandem.rpc.form import Form
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    ModelInfo,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillUpdate,
    ProcessInfo,
    Registration,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)
from tandem.rpc.serve_messages import ServeCall, ServeUpdate
from tandem.rpc.session_messages import OPEN_ANSWER, OPEN_CALL, OpenAnswer, OpenCall
from tandem.rpc.v1 import router_pb2, worker_pb2

WORKER_SERVICE = "tandem.rpc.v1.Worker"
ROUTER_SERVICE = "tandem.rpc.v1.Router"
SESSION_SERVICE = "tandem.rpc.v1.Session"
Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """A remote method and the forms of its request and answer; of a streaming method, of each of its answers."""

    service: str
    name: str
    request: Form[Q]
    answer: Form[A]

    @property
    def path(self) -> str:
        """Path in HTTP/2, as `/service/method`."""
        return f"/{self.service}/{self.name}"

    def encode_answer(self, answer: A) -> bytes:
        """Returns the encoded answer.

        Raises:
            RuntimeError: it cannot be encoded: a bug of this process, which must not look like an error of the caller.
        """
        try:
            return self.answer.encode(answer)
        except InvalidRequestError as error:
            raise RuntimeError(f"{self.name} has an answer that cannot be sent: {error}") from error


def _nothing(message_type: type[Message]) -> Form[None]:
    return Form(message_type, lambda _: message_type(), lambda _: None)


def _worker(name: str, request: Form[Q], answer: Form[A]) -> Method[Q, A]:
    return Method(WORKER_SERVICE, name, request, answer)


def _router(name: str, request: Form[Q], answer: Form[A]) -> Method[Q, A]:
    return Method(ROUTER_SERVICE, name, request, answer)


OPEN: Method[OpenCall, OpenAnswer] = Method(SESSION_SERVICE, "Open", OPEN_CALL, OPEN_ANSWER)

STATUS: Method[None, WorkerStatus] = _worker("Status", _nothing(worker_pb2.StatusRequest), forms.STATUS)
WATCH: Method[float, WorkerStatus] = _worker("Watch", forms.WATCH_CALL, forms.WATCHED_STATUS)
DRAIN: Method[None, None] = _worker("Drain", _nothing(worker_pb2.DrainRequest), _nothing(worker_pb2.DrainResponse))
GENERATE: Method[GenerateCall, GenerateUpdate] = _worker("Generate", forms.GENERATE_CALL, forms.GENERATE_UPDATE)
SERVE: Method[ServeCall, ServeUpdate] = _worker("Serve", forms.SERVE_CALL, forms.SERVE_UPDATE)
PREFILL: Method[PrefillCall, PrefillUpdate] = _worker("Prefill", forms.PREFILL_CALL, forms.PREFILL_UPDATE)
GREET: Method[Greeting, Greeting] = _worker("Greet", forms.GREET_CALL, forms.GREET_ANSWER)
LEASE: Method[LeaseCall, LeaseUpdate] = _worker("Lease", forms.LEASE_CALL, forms.LEASE_ANSWER)
RENEW: Method[Sequence[str], Sequence[str]] = _worker("Renew", forms.RENEW_CALL, forms.RENEW_ANSWER)
CONFIRM: Method[ConfirmCall, ConfirmAnswer] = _worker("Confirm", forms.CONFIRM_CALL, forms.CONFIRM_ANSWER)
RELEASE: Method[Sequence[str], None] = _worker("Release", forms.RELEASE_CALL, _nothing(worker_pb2.ReleaseResponse))

PAIR: Method[PairCall, PairingAnswer] = _router("Pair", forms.PAIR_CALL, forms.PAIRING)
SETTLE: Method[Settlement, None] = _router("Settle", forms.SETTLEMENT, _nothing(router_pb2.SettleResponse))
DESCRIBE: Method[None, ProcessInfo] = _router("Describe", _nothing(router_pb2.DescribeRequest), forms.PROCESS)
MODELS: Method[None, Sequence[ModelInfo]] = _router("Models", _nothing(router_pb2.ModelsRequest), forms.MODELS)
WORKERS: Method[None, Sequence[WorkerListing]] = _router("Workers", _nothing(router_pb2.WorkersRequest), forms.LISTINGS)
DECISIONS: Method[int, Sequence[Decision]] = _router("Decisions", forms.DECISIONS_CALL, forms.DECISIONS)
REGISTER: Method[Registration, Sequence[WorkerRecord]] = _router("Register", forms.REGISTRATION, forms.RECORDS)
UNREGISTER: Method[WorkerRecord, None] = _router(
    "Unregister", forms.UNREGISTER_CALL, _nothing(router_pb2.UnregisterResponse)
)
PUBLISH: Method[BlockReport, PublishResult] = _router("Publish", forms.REPORT, forms.PUBLISH_ANSWER)
REPLACE: Method[BlockSnapshot, PublishResult] = _router("Replace", forms.SNAPSHOT, forms.REPLACE_ANSWER)
