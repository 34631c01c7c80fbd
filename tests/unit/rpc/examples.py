"""One value of every message with all of its fields set, so that its bytes can be recorded.

Mappings have one entry: protobuf leaves the order of several open.
"""

from array import array
from typing import Any

from tandem.core.events import BlockRemoved, BlockStored
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import Pin
from tandem.core.process_usage import ProcessUsage
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.kvcache.block_table import BlockRange
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Role, WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc import methods
from tandem.rpc.block_messages import BlockReport, BlockSnapshot
from tandem.rpc.credentials import Party
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    LinkReport,
    ModelInfo,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillSample,
    PrefillUpdate,
    ProcessInfo,
    Registration,
    StepSample,
    WorkerAddress,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)
from tandem.rpc.methods import Method
from tandem.rpc.prefill_messages import ChosenToken
from tandem.rpc.serve_messages import CallStatus, Credit, OtherUpdate, RequestStart, ServeCall, ServeUpdate, TextUpdate
from tandem.rpc.session_messages import OpenAnswer, OpenCall

DECODE, PREFILL = WorkerAddress("d0", "127.0.0.1:7", "i1"), WorkerAddress("p0", "127.0.0.1:8")
PEER = WorkerAddress("p1", "[::1]:9", "é")
HASH, OTHER_HASH = bytes(range(32)), bytes(range(32, 64))
SCOPE = CacheScope(adapter=HASH, salt="tenant")
PINS = (Pin(64, 300.0), Pin(128, 3600.0))
PARAMS = SamplingParams(
    max_tokens=128,
    min_tokens=0,
    temperature=0.0,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={7: -1.5},
    allowed_token_ids=(1, 2, 300),
    bad_words=((5,), (6, 7)),
    seed=-3,
    n=1,
    logprobs=0,
    prompt_logprobs=2,
    stop=("END", "\n"),
    stop_token_ids=(2,),
    include_stop_str_in_output=True,
    ignore_eos=False,
    grammar="%llguidance {}",
    reasoning=Reasoning((10,), (11, 12), True, 64),
    skip_special_tokens=False,
)
LOGPROBS = TokenLogprobs(9, -0.25, 1, ((9, -0.25), (8, float("-inf"))))
OUTPUT = RequestOutput(
    request_id="r",
    index=1,
    token_ids=(9, 300),
    text="ü",
    logprobs=(LOGPROBS, LOGPROBS),
    prompt_logprobs=(None, LOGPROBS),
    finish_reason=FinishReason.STOP,
    stop_reason="END",
    metrics=RequestMetrics(1.5, 1.75, 2.0, 2.5, 100, 2, 64, 1, PINS),
)
STAGES = (
    Stage("queue", "d0", 1e9, 0.5, {"num_tokens": -3}),
    Stage("fetch", "d0", 1e9, 0.0, {"gb_per_s": 1.5}),
    Stage("pair", "router", 1e9, 0.25, {"policy": ""}),
)
WORK = PrefillWork(1.0, 100.5, 5000.0)
MODEL = ModelInfo(
    name="m",
    fingerprint="f",
    max_model_len=4096,
    vocab_size=32000,
    block_size=16,
    sampling_defaults={"top_p": 0.9},
    num_prefill=1,
    num_decode=2,
)
STATE = WorkerState(
    worker_id="d0",
    role=Role.DECODE,
    kind="cpu",
    fingerprint="f",
    block_size=16,
    block_bytes=65536,
    chunk_tokens=512,
    num_total_blocks=1000,
    num_free_blocks=900,
    queued=WORK,
    num_running=3,
    num_context_tokens=700,
    num_awaiting_kv=1,
    draining=True,
    reported_at_s=2.5,
    figures_age_s=0.0,
    taken_age_s=0.125,
)
STATUS = WorkerStatus(
    worker=DECODE,
    pid=42,
    epoch=7,
    lifecycle="ready",
    state=STATE,
    model=MODEL,
    blocks={"free": 900},
    num_waiting=2,
    links=(LinkReport(source_id="p0", transport="tcp", path="eth0", bytes_per_s=1e9, latency_s=0.001, is_slow=True),),
    prefill_samples=(PrefillSample(work=WORK, duration_s=0.25),),
    step_samples=(StepSample(num_running=3, num_context_tokens=700, duration_s=0.01),),
    unreachable=("p9",),
    usage=ProcessUsage(2**30, 0.5),
)
GENERATE = GenerateCall(
    request_id="r",
    prompt_token_ids=array("I", (1, 2, 2**31 - 1)),
    params=PARAMS,
    scope=SCOPE,
    output_token_ids=(3,),
    priority=-2,
    decode=DECODE,
    prefill=PREFILL,
    spares=(PEER, PREFILL),
    fetch_from=PEER,
    num_fetch_blocks=4,
    pins=PINS,
)
LEASE = LeaseUpdate(
    lease_id="l",
    num_tokens=48,
    groups=(BlockRange(2, (5, 6)), BlockRange(0, ())),
    is_last=True,
    ttl_s=30.0,
)
PREFILL_CALL = PrefillCall(
    request_id="r",
    reader=DECODE,
    prompt_token_ids=array("I", (1, 2, 3)),
    params=SamplingParams(seed=2**64 - 1),
    scope=CacheScope(),
    output_token_ids=(4,),
    priority=5,
    prefill=PREFILL,
    fetch_from=PEER,
    num_fetch_blocks=4,
    lease_id="0" * 32,
    pins=PINS,
)
GREETING = Greeting(
    worker=DECODE,
    epoch=7,
    protocol_version=2,
    compatibility={"layout": "1"},
    site={"same_host": True},
    cards={"tcp": b"\x00\xff"},
    num_blocks=1000,
)
PAIR = PairCall(
    request_id="r",
    model="m",
    token_ids=array("I", (1, 2, 3)),
    num_expected_output=64,
    scope=SCOPE,
    session_id="",
    max_ttft_ms=200.0,
    max_tpot_ms=0.0,
    excluded=("d1", "p1"),
    local_prefill=True,
    fingerprint="f",
)
PAIRING = PairingAnswer(
    decode=DECODE,
    prefill=PREFILL,
    spares=(PEER,),
    fetch_from=PEER,
    num_fetch_blocks=4,
    prefill_cached_blocks=3,
    decode_cached_blocks=2,
    predicted_ms={"ttft": 12.5},
    policy="predicted",
    decision_s=0.001,
    fingerprint="f",
)
DECISION = Decision(
    request_id="r",
    age_s=1.5,
    policy="predicted",
    prefill_id="p0",
    decode_id="",
    fetch_from_id="p1",
    refusal="full",
    predicted_ms={"ttft": 12.5},
    measured_ms={"queue": 0.0},
)
SETTLEMENT = Settlement(request_id="r", queue_ms=0.0, prefill_ms=1.0, transfer_ms=2.0, ttft_ms=3.0)
RECORD = WorkerRecord(DECODE, "decode", "m", "pool")
SERVE_CALL = ServeCall((RequestStart(1, b"call", "00-trace", 64),), (Credit(2, 8), Credit(3, 0)), (4, 5))
SERVE_UPDATE = ServeUpdate(
    (TextUpdate(1, (9, 300), "ü"), TextUpdate(2, (), "")),
    (OtherUpdate(3, b"news"), OtherUpdate(4, b"", CallStatus(14, "gone", {"retry-after": "1"}))),
)
REPORT = BlockReport("d0", 7, (BlockStored(HASH, None, 0), BlockStored(OTHER_HASH, HASH, 1), BlockRemoved(HASH, 2)), 9)
PARTY = Party(role="decode", address="127.0.0.1:7", incarnation="i1")
OPEN_CALL = OpenCall(
    party=PARTY, nonce=HASH, oldest_protocol=2, newest_protocol=3, expected_incarnation="i2", proof=OTHER_HASH
)
OPEN_ANSWER = OpenAnswer(party=PARTY, nonce=HASH, session_id=bytes(16), protocol=3, proof=OTHER_HASH)

# Of every method: a request and an answer.
EXAMPLES: dict[Method[Any, Any], tuple[Any, Any]] = {
    methods.OPEN: (OPEN_CALL, OPEN_ANSWER),
    methods.STATUS: (None, STATUS),
    methods.WATCH: (0.25, STATUS),
    methods.DRAIN: (None, None),
    methods.GENERATE: (GENERATE, GenerateUpdate(OUTPUT, STAGES)),
    methods.SERVE: (SERVE_CALL, SERVE_UPDATE),
    methods.PREFILL: (PREFILL_CALL, PrefillUpdate(LEASE, ChosenToken(9, LOGPROBS), 0, STAGES, PINS)),
    methods.GREET: (GREETING, GREETING),
    methods.LEASE: (LeaseCall(reader=DECODE, lease_id="l", block_hashes=(HASH, OTHER_HASH)), LEASE),
    methods.RENEW: (("l", "k"), ("k",)),
    methods.CONFIRM: (
        ConfirmCall(lease_id="l", checksum_block_ids=(1, 300)),
        ConfirmAnswer(True, (2**32 - 1, 0)),
    ),
    methods.RELEASE: (("l", "k"), None),
    methods.PAIR: (PAIR, PAIRING),
    methods.SETTLE: (SETTLEMENT, None),
    methods.DESCRIBE: (
        None,
        ProcessInfo(pid=42, incarnation="i1", lifecycle="ready", usage=ProcessUsage(2**30, None)),
    ),
    methods.MODELS: (None, (MODEL, MODEL)),
    methods.WORKERS: (None, (WorkerListing(status=STATUS, age_s=0.5, is_alive=True, slowness=2.5),)),
    methods.DECISIONS: (16, (DECISION,)),
    methods.REGISTER: (Registration(RECORD, True), (RECORD, RECORD)),
    methods.UNREGISTER: (RECORD, None),
    methods.PUBLISH: (REPORT, PublishResult.RESYNC),
    methods.REPLACE: (BlockSnapshot("d0", 7, (HASH, OTHER_HASH), 9), PublishResult.STALE),
}
