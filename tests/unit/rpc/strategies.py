"""Any value of every message, for hypothesis: zeros, empty texts and missing parts included."""

from array import array
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tandem.core.draft_counts import DraftCounts
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.expert_rows import ExpertRows
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import MAX_TTL_S, Pin
from tandem.core.process_usage import ProcessUsage
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.speculate import DRAFTER_CHOICES
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.kvcache.block_table import BlockRange
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Role, WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc import methods
from tandem.rpc.block_messages import BlockReport, BlockSnapshot
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
from tandem.rpc.prefill_messages import ChosenToken, LeasedDraftState
from tandem.rpc.rank_messages import RankReport
from tandem.rpc.serve_messages import CallStatus, Credit, OtherUpdate, RequestStart, ServeCall, ServeUpdate, TextUpdate

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAME = TEXT.filter(bool)
COUNT = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**32 - 1)
TOKEN = st.integers(0, 2**31 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
AMOUNT = st.floats(0, allow_nan=False, allow_infinity=False)
LOGPROB = st.floats(max_value=0, allow_nan=False)
HASH = st.binary(min_size=32, max_size=32)
BOOL = st.booleans()


def tuples(entries: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Any]:
    return st.lists(entries, min_size=least, max_size=3).map(tuple)


def maybe(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | value


def table(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(TEXT, values, max_size=3)


TOKENS = tuples(TOKEN)
PROMPTS = tuples(TOKEN, 1).map(lambda ids: array("I", ids))
JSON = st.recursive(
    st.none() | BOOL | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)

ADDRESS = st.builds(WorkerAddress, NAME, TEXT, TEXT)
REASONING = st.builds(
    Reasoning,
    start_token_ids=TOKENS,
    end_token_ids=tuples(TOKEN, 1),
    is_open=BOOL,
    max_tokens=maybe(TOKEN),
)
PLAIN_PARAMS = st.builds(
    SamplingParams,
    max_tokens=maybe(st.integers(10, 2**31 - 1)),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_k=TOKEN,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3),
    allowed_token_ids=maybe(tuples(TOKEN, 1)),
    bad_words=tuples(tuples(TOKEN, 1)),
    seed=maybe(st.integers(-(2**63), 2**64 - 1)),
    n=st.integers(1, 128),
    logprobs=maybe(st.integers(0, 20)),
    prompt_logprobs=maybe(st.integers(0, 20)),
    stop=tuples(NAME),
    stop_token_ids=TOKENS,
    include_stop_str_in_output=BOOL,
    ignore_eos=BOOL,
    reasoning=maybe(REASONING),
    skip_special_tokens=BOOL,
    speculate=maybe(st.sampled_from(DRAFTER_CHOICES)),
)
# A grammar says the end itself.
GRAMMAR_PARAMS = st.builds(replace, PLAIN_PARAMS, min_tokens=st.just(0), ignore_eos=st.just(False), grammar=NAME)
PARAMS = PLAIN_PARAMS | GRAMMAR_PARAMS
LOGPROBS = st.builds(TokenLogprobs, TOKEN, LOGPROB, SMALL, tuples(st.tuples(TOKEN, LOGPROB)))
PINS = tuples(st.builds(Pin, TOKEN, st.floats(0, MAX_TTL_S, exclude_min=True)))
DRAFT_COUNTS = st.builds(
    DraftCounts, num_steps=COUNT, drafted_at=tuples(COUNT), accepted_at=tuples(COUNT), saved_s=maybe(NUMBER)
)
METRICS = st.builds(
    RequestMetrics,
    NUMBER,
    maybe(NUMBER),
    maybe(NUMBER),
    maybe(NUMBER),
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    PINS,
    maybe(DRAFT_COUNTS),
)
OUTPUT = st.builds(
    RequestOutput,
    request_id=TEXT,
    index=SMALL,
    token_ids=TOKENS,
    text=TEXT,
    logprobs=maybe(tuples(LOGPROBS)),
    prompt_logprobs=maybe(tuples(maybe(LOGPROBS))),
    finish_reason=maybe(st.sampled_from(FinishReason)),
    stop_reason=maybe(TOKEN | TEXT),
    metrics=maybe(METRICS),
)
ATTRIBUTE = TEXT | st.integers(-(2**63), 2**63 - 1) | NUMBER
STAGE = st.builds(Stage, TEXT, TEXT, NUMBER, NUMBER, table(ATTRIBUTE))
WORK = st.builds(PrefillWork, AMOUNT, AMOUNT, AMOUNT)
STATE = st.builds(
    WorkerState,
    worker_id=NAME,
    role=st.sampled_from(Role),
    kind=TEXT,
    fingerprint=TEXT,
    block_size=st.integers(1, 1024),
    block_bytes=st.integers(1, 2**40),
    request_bytes=st.integers(0, 2**40),
    names_states=BOOL,
    chunk_tokens=st.integers(1, 2**31),
    num_total_blocks=st.integers(1, 2**31),
    num_free_blocks=COUNT,
    queued=WORK,
    num_running=COUNT,
    num_context_tokens=COUNT,
    num_awaiting_kv=COUNT,
    draining=BOOL,
    reported_at_s=NUMBER,
    figures_age_s=AMOUNT,
    taken_age_s=AMOUNT,
)
MODEL = st.builds(
    ModelInfo,
    name=TEXT,
    fingerprint=TEXT,
    max_model_len=COUNT,
    vocab_size=COUNT,
    block_size=COUNT,
    sampling_defaults=table(JSON),
    num_prefill=COUNT,
    num_decode=COUNT,
)
LINK = st.builds(
    LinkReport, source_id=NAME, transport=TEXT, path=TEXT, bytes_per_s=AMOUNT, latency_s=AMOUNT, is_slow=BOOL
)
USAGE = st.builds(ProcessUsage, memory_bytes=COUNT, cpu_cores=maybe(AMOUNT))
STATUS = st.builds(
    WorkerStatus,
    worker=ADDRESS,
    pid=COUNT,
    epoch=COUNT,
    lifecycle=st.sampled_from(["starting", "ready", "recovering", "draining", "stopped"]),
    state=STATE,
    model=MODEL,
    blocks=table(COUNT),
    num_waiting=COUNT,
    links=tuples(LINK),
    prefill_samples=tuples(st.builds(PrefillSample, work=WORK, duration_s=AMOUNT)),
    step_samples=tuples(st.builds(StepSample, num_running=COUNT, num_context_tokens=COUNT, duration_s=AMOUNT)),
    unreachable=tuples(NAME),
    usage=maybe(USAGE),
    drafts=maybe(DRAFT_COUNTS),
    ranks=maybe(
        st.builds(
            RankReport,
            pids=tuples(COUNT),
            num_epochs=COUNT,
            experts=maybe(st.builds(ExpertRows, by_rank=tuples(COUNT), busiest=COUNT)),
            stages=tuples(st.integers(0, 7)),
            contexts=tuples(st.integers(0, 7)),
            hosts=tuples(NAME),
            silent_s=tuples(AMOUNT),
        )
    ),
)
SCOPE = st.builds(CacheScope, adapter=maybe(st.binary(min_size=32, max_size=32)), salt=TEXT)
GENERATE_CALL = st.builds(
    GenerateCall,
    request_id=NAME,
    prompt_token_ids=PROMPTS,
    params=PARAMS,
    output_token_ids=TOKENS,
    priority=st.integers(-(2**63), 2**63 - 1),
    scope=SCOPE,
    decode=maybe(ADDRESS),
    prefill=maybe(ADDRESS),
    spares=tuples(ADDRESS),
    fetch_from=maybe(ADDRESS),
    num_fetch_blocks=COUNT,
    pins=PINS,
)
PREFILL_CALL = st.builds(
    PrefillCall,
    request_id=NAME,
    reader=ADDRESS,
    prompt_token_ids=PROMPTS,
    params=PARAMS,
    output_token_ids=TOKENS,
    priority=st.integers(-(2**63), 2**63 - 1),
    scope=SCOPE,
    prefill=maybe(ADDRESS),
    fetch_from=maybe(ADDRESS),
    num_fetch_blocks=COUNT,
    lease_id=TEXT,
    pins=PINS,
    drafter=TEXT,
)
LEASE = st.builds(
    LeaseUpdate,
    lease_id=TEXT,
    num_tokens=COUNT,
    groups=tuples(st.builds(BlockRange, COUNT, tuples(SMALL))),
    is_last=BOOL,
    ttl_s=AMOUNT,
)
PREFILL_UPDATE = st.builds(
    PrefillUpdate,
    maybe(LEASE),
    maybe(st.builds(ChosenToken, TOKEN, maybe(LOGPROBS))),
    maybe(COUNT),
    tuples(STAGE),
    PINS,
    maybe(st.builds(LeasedDraftState, COUNT, COUNT, COUNT, tuples(SMALL))),
)
GREETING = st.builds(
    Greeting,
    worker=ADDRESS,
    epoch=COUNT,
    protocol_version=SMALL,
    compatibility=table(TEXT),
    site=table(TEXT | BOOL),
    cards=table(st.binary(max_size=8)),
    num_blocks=COUNT,
)
DECISION = st.builds(
    Decision,
    request_id=TEXT,
    age_s=NUMBER,
    policy=TEXT,
    prefill_id=maybe(TEXT),
    decode_id=maybe(TEXT),
    fetch_from_id=maybe(TEXT),
    refusal=TEXT,
    predicted_ms=table(NUMBER),
    measured_ms=table(NUMBER),
)
PAIR_CALL = st.builds(
    PairCall,
    request_id=NAME,
    model=TEXT,
    token_ids=PROMPTS,
    num_expected_output=COUNT,
    scope=SCOPE,
    session_id=maybe(TEXT),
    max_ttft_ms=maybe(NUMBER),
    max_tpot_ms=maybe(NUMBER),
    excluded=tuples(TEXT),
    local_prefill=BOOL,
    fingerprint=maybe(TEXT),
    pairing_id=TEXT,
)
PAIRING = st.builds(
    PairingAnswer,
    decode=ADDRESS,
    prefill=maybe(ADDRESS),
    spares=tuples(ADDRESS),
    fetch_from=maybe(ADDRESS),
    num_fetch_blocks=COUNT,
    prefill_cached_blocks=COUNT,
    decode_cached_blocks=COUNT,
    predicted_ms=table(NUMBER),
    policy=TEXT,
    decision_s=AMOUNT,
    fingerprint=TEXT,
)
SETTLEMENT = st.builds(
    Settlement,
    request_id=NAME,
    queue_ms=maybe(NUMBER),
    prefill_ms=maybe(NUMBER),
    transfer_ms=maybe(NUMBER),
    ttft_ms=maybe(NUMBER),
    pairing_id=TEXT,
)
RECORD = st.builds(WorkerRecord, ADDRESS, st.sampled_from(["prefill", "decode", "both"]), TEXT, TEXT)
EVENT: st.SearchStrategy[BlockEvent] = st.builds(BlockStored, HASH, maybe(HASH), SMALL) | st.builds(
    BlockRemoved, HASH, SMALL
)

SERVE_CALL = st.builds(
    ServeCall,
    tuples(st.builds(RequestStart, COUNT, st.binary(max_size=8), TEXT, COUNT)),
    tuples(st.builds(Credit, COUNT, COUNT)),
    tuples(COUNT),
)
OTHER_UPDATE = st.builds(
    OtherUpdate, COUNT, st.binary(max_size=8), maybe(st.builds(CallStatus, SMALL, TEXT, table(TEXT)))
)
SERVE_UPDATE = st.builds(ServeUpdate, tuples(st.builds(TextUpdate, COUNT, TOKENS, TEXT)), tuples(OTHER_UPDATE))

# Of every method: its requests and its answers.
EVERY: dict[Method[Any, Any], tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    methods.STATUS: (st.none(), STATUS),
    methods.WATCH: (st.floats(0.001, 3600), STATUS),
    methods.DRAIN: (st.none(), st.none()),
    methods.GENERATE: (GENERATE_CALL, st.builds(GenerateUpdate, OUTPUT, tuples(STAGE))),
    methods.SERVE: (SERVE_CALL, SERVE_UPDATE),
    methods.PREFILL: (PREFILL_CALL, PREFILL_UPDATE),
    methods.GREET: (GREETING, GREETING),
    methods.LEASE: (st.builds(LeaseCall, reader=ADDRESS, lease_id=NAME, block_hashes=tuples(HASH)), LEASE),
    methods.RENEW: (tuples(TEXT), tuples(TEXT)),
    methods.CONFIRM: (
        st.builds(ConfirmCall, lease_id=NAME, checksum_block_ids=tuples(SMALL)),
        st.builds(ConfirmAnswer, BOOL, tuples(SMALL)),
    ),
    methods.RELEASE: (tuples(TEXT), st.none()),
    methods.PAIR: (PAIR_CALL, PAIRING),
    methods.SETTLE: (SETTLEMENT, st.none()),
    methods.DESCRIBE: (
        st.none(),
        st.builds(ProcessInfo, pid=COUNT, incarnation=TEXT, lifecycle=TEXT, usage=maybe(USAGE)),
    ),
    methods.MODELS: (st.none(), tuples(MODEL)),
    methods.WORKERS: (
        st.none(),
        tuples(st.builds(WorkerListing, status=STATUS, age_s=NUMBER, is_alive=BOOL, slowness=st.none() | NUMBER)),
    ),
    methods.DECISIONS: (st.integers(1, 4096), tuples(DECISION)),
    methods.REGISTER: (st.builds(Registration, RECORD, BOOL), tuples(RECORD)),
    methods.UNREGISTER: (RECORD, st.none()),
    methods.PUBLISH: (
        st.builds(BlockReport, NAME, COUNT, tuples(EVENT), COUNT),
        st.sampled_from(PublishResult),
    ),
    methods.REPLACE: (
        st.builds(BlockSnapshot, NAME, COUNT, tuples(HASH), COUNT),
        st.sampled_from(PublishResult),
    ),
}
