"""Every remote method: its name on the wire and the forms of its request and its answers.

`client` calls by this table and `server` serves by it, so neither can disagree with the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from tandem.core.errors import InvalidRequestError
from tandem.locality.base import PublishResult
from tandem.rpc import codec_common, codec_request, codec_router, codec_serve, codec_worker
from tandem.rpc.codec_router import BlockReport, BlockSnapshot
from tandem.rpc.form import Form, required
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    GenerateCall,
    GenerateNews,
    Greeting,
    LeaseCall,
    LeaseNews,
    ModelInfo,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillNews,
    ProcessInfo,
    Registration,
    Settlement,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)
from tandem.rpc.serve_messages import ServeCall, ServeNews
from tandem.rpc.session_messages import OPEN_ANSWER, OPEN_CALL, OpenAnswer, OpenCall
from tandem.rpc.v1 import router_pb2, worker_pb2

WORKER_SERVICE = "tandem.rpc.v1.Worker"
ROUTER_SERVICE = "tandem.rpc.v1.Router"
SESSION_SERVICE = "tandem.rpc.v1.Session"
T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """A remote method. Answers of a stream have its form one by one."""

    service: str
    name: str
    request: Form[Q]
    answer: Form[A]

    @property
    def path(self) -> str:
        """As HTTP/2 names it."""
        return f"/{self.service}/{self.name}"

    def encode_answer(self, answer: A) -> bytes:
        """As sent.

        Raises:
            RuntimeError: it cannot be: our bug, which the caller must not take for its own.
        """
        try:
            return self.answer.encode(answer)
        except InvalidRequestError as error:
            raise RuntimeError(f"{self.name} has an answer that cannot be sent: {error}") from error


def _nothing(message_type: type[Message]) -> Form[None]:
    return Form(message_type, lambda _: message_type(), lambda _: None)


def _inside(message_type: type[Message], field: str, put: Callable[[T], Message], take: Callable[[Any], T]) -> Form[T]:
    """The form of a message that holds one other."""
    return Form(message_type, lambda value: message_type(**{field: put(value)}), lambda m: take(required(m, field)))


def _worker(name: str, request: Form[Q], answer: Form[A]) -> Method[Q, A]:
    return Method(WORKER_SERVICE, name, request, answer)


def _router(name: str, request: Form[Q], answer: Form[A]) -> Method[Q, A]:
    return Method(ROUTER_SERVICE, name, request, answer)


OPEN: Method[OpenCall, OpenAnswer] = Method(SESSION_SERVICE, "Open", OPEN_CALL, OPEN_ANSWER)

STATUS: Method[None, WorkerStatus] = _worker(
    "Status",
    _nothing(worker_pb2.StatusRequest),
    _inside(worker_pb2.StatusResponse, "status", codec_common.put_status, codec_common.take_status),
)
WATCH: Method[float, WorkerStatus] = _worker(
    "Watch",
    Form(worker_pb2.WatchRequest, codec_worker.put_interval, codec_worker.take_interval),
    _inside(worker_pb2.WatchResponse, "status", codec_common.put_status, codec_common.take_status),
)
DRAIN: Method[None, None] = _worker("Drain", _nothing(worker_pb2.DrainRequest), _nothing(worker_pb2.DrainResponse))
GENERATE: Method[GenerateCall, GenerateNews] = _worker(
    "Generate",
    Form(worker_pb2.GenerateRequest, codec_worker.put_generate_call, codec_worker.take_generate_call),
    Form(worker_pb2.GenerateResponse, codec_request.put_generate_news, codec_request.take_generate_news),
)
SERVE: Method[ServeCall, ServeNews] = _worker(
    "Serve",
    Form(worker_pb2.ServeRequest, codec_serve.put_serve_call, codec_serve.take_serve_call),
    Form(worker_pb2.ServeResponse, codec_serve.put_serve_news, codec_serve.take_serve_news),
)
PREFILL: Method[PrefillCall, PrefillNews] = _worker(
    "Prefill",
    Form(worker_pb2.PrefillRequest, codec_worker.put_prefill_call, codec_worker.take_prefill_call),
    Form(worker_pb2.PrefillResponse, codec_worker.put_prefill_news, codec_worker.take_prefill_news),
)
GREET: Method[Greeting, Greeting] = _worker(
    "Greet",
    _inside(worker_pb2.GreetRequest, "greeting", codec_worker.put_greeting, codec_worker.take_greeting),
    _inside(worker_pb2.GreetResponse, "greeting", codec_worker.put_greeting, codec_worker.take_greeting),
)
LEASE: Method[LeaseCall, LeaseNews] = _worker(
    "Lease",
    Form(worker_pb2.LeaseRequest, codec_worker.put_lease_call, codec_worker.take_lease_call),
    _inside(worker_pb2.LeaseResponse, "lease", codec_worker.put_lease, codec_worker.take_lease),
)
RENEW: Method[Sequence[str], Sequence[str]] = _worker(
    "Renew",
    Form(worker_pb2.RenewRequest, codec_worker.put_renew, lambda message: tuple(message.lease_ids)),
    Form(worker_pb2.RenewResponse, codec_worker.put_renew_answer, lambda message: tuple(message.invalid_lease_ids)),
)
CONFIRM: Method[ConfirmCall, ConfirmAnswer] = _worker(
    "Confirm",
    Form(worker_pb2.ConfirmRequest, codec_worker.put_confirm_call, codec_worker.take_confirm_call),
    Form(worker_pb2.ConfirmResponse, codec_worker.put_confirm_answer, codec_worker.take_confirm_answer),
)
RELEASE: Method[Sequence[str], None] = _worker(
    "Release",
    Form(worker_pb2.ReleaseRequest, codec_worker.put_release, lambda message: tuple(message.lease_ids)),
    _nothing(worker_pb2.ReleaseResponse),
)

PAIR: Method[PairCall, PairingAnswer] = _router(
    "Pair",
    Form(router_pb2.PairRequest, codec_router.put_pair_call, codec_router.take_pair_call),
    Form(router_pb2.PairResponse, codec_router.put_pairing, codec_router.take_pairing),
)
SETTLE: Method[Settlement, None] = _router(
    "Settle",
    Form(router_pb2.SettleRequest, codec_router.put_settlement, codec_router.take_settlement),
    _nothing(router_pb2.SettleResponse),
)
DESCRIBE: Method[None, ProcessInfo] = _router(
    "Describe",
    _nothing(router_pb2.DescribeRequest),
    Form(router_pb2.DescribeResponse, codec_router.put_process, codec_router.take_process),
)
MODELS: Method[None, Sequence[ModelInfo]] = _router(
    "Models",
    _nothing(router_pb2.ModelsRequest),
    Form(router_pb2.ModelsResponse, codec_router.put_models, codec_router.take_models),
)
WORKERS: Method[None, Sequence[WorkerListing]] = _router(
    "Workers",
    _nothing(router_pb2.WorkersRequest),
    Form(router_pb2.WorkersResponse, codec_router.put_listings, codec_router.take_listings),
)
DECISIONS: Method[int, Sequence[Decision]] = _router(
    "Decisions",
    Form(router_pb2.DecisionsRequest, codec_router.put_num_latest, codec_router.take_num_latest),
    Form(router_pb2.DecisionsResponse, codec_router.put_decisions, codec_router.take_decisions),
)
REGISTER: Method[Registration, Sequence[WorkerRecord]] = _router(
    "Register",
    Form(router_pb2.RegisterRequest, codec_router.put_register, codec_router.take_register),
    Form(router_pb2.RegisterResponse, codec_router.put_records, codec_router.take_records),
)
UNREGISTER: Method[WorkerRecord, None] = _router(
    "Unregister",
    Form(router_pb2.UnregisterRequest, codec_router.put_unregister, codec_router.take_unregister),
    _nothing(router_pb2.UnregisterResponse),
)
PUBLISH: Method[BlockReport, PublishResult] = _router(
    "Publish",
    Form(router_pb2.PublishRequest, codec_router.put_report, codec_router.take_report),
    Form(router_pb2.PublishResponse, codec_router.put_publish_answer, codec_router.take_result),
)
REPLACE: Method[BlockSnapshot, PublishResult] = _router(
    "Replace",
    Form(router_pb2.ReplaceRequest, codec_router.put_snapshot, codec_router.take_snapshot),
    Form(router_pb2.ReplaceResponse, codec_router.put_replace_answer, codec_router.take_result),
)
