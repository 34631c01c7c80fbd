import os

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.draft_counts import DraftCounts
from tandem.core.expert_rows import ExpertRows
from tandem.core.output import RequestMetrics
from tandem.core.pins import Pin
from tandem.core.types import FinishReason
from tandem.kvcache.promised_blocks import PromisedUsage
from tandem.routing.snapshot import Role, WorkerState
from tandem.rpc.messages import LinkReport, ModelInfo, WorkerAddress, WorkerStatus
from tandem.telemetry.engine_metrics import WorkerMetrics

LABELS = (("engine", "0"), ("model_name", "demo"))
BUCKET_ENDS = ("1.0", "2.0", "3.0", "4.0", "+Inf")


def status(
    *,
    blocks: dict[str, int],
    num_accepted: int = 0,
    num_waiting: int = 0,
    links: tuple[str, ...] = (),
    num_total_blocks: int = 100,
) -> WorkerStatus:
    state = WorkerState(
        worker_id="decode-0",
        role=Role.DECODE,
        kind="cpu",
        fingerprint="f",
        block_size=16,
        block_bytes=1024,
        chunk_tokens=512,
        num_total_blocks=num_total_blocks,
        num_free_blocks=60,
        num_running=num_accepted,
    )
    model = ModelInfo(name="demo", fingerprint="f", max_model_len=4096, vocab_size=10, block_size=16)
    return WorkerStatus(
        worker=WorkerAddress("decode-0", "127.0.0.1:1"),
        pid=os.getpid(),
        epoch=1,
        lifecycle="ready",
        state=state,
        model=model,
        blocks=blocks,
        num_waiting=num_waiting,
        links=tuple(
            LinkReport(source_id=name, transport="tcp", path="tcp", bytes_per_s=5e8, latency_s=1e-4, is_slow=False)
            for name in links
        ),
    )


def exported(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def finished(**changes: object) -> RequestMetrics:
    fields: dict[str, float | int | None] = {
        "arrival_s": 10.0,
        "first_scheduled_s": 10.5,
        "first_token_s": 12.0,
        "last_token_s": 15.0,
        "num_prompt_tokens": 40,
        "num_output_tokens": 4,
        "num_cached_tokens": 32,
        "num_preemptions": 2,
    }
    return RequestMetrics(**(fields | changes))  # type: ignore[arg-type]


def test_a_status_becomes_gauges() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    blocks = {"free": 50, "cached": 20, "used": 15, "leased": 10, "transferring": 5}
    metrics.observe_status(status(blocks=blocks, num_accepted=7, num_waiting=3, links=("prefill-0",)))
    found = exported(registry)
    assert found["vllm:num_requests_running", LABELS] == 4
    assert found["vllm:num_requests_waiting", LABELS] == 3
    assert abs(found["vllm:kv_cache_usage_perc", LABELS] - 0.3) < 1e-9
    assert found["vllm:cache_config_info", (("block_size", "16"), ("engine", "0"), ("num_gpu_blocks", "100"))] == 1
    assert {state: found["tandem_kv_blocks", (("state", state),)] for state in blocks} == blocks
    assert found["tandem_link_bytes_per_second", (("source", "prefill-0"),)] == 5e8


def test_links_and_states_that_are_gone_are_not_exported() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.observe_status(status(blocks={"free": 1, "used": 1}, links=("prefill-0", "prefill-1")))
    metrics.observe_status(status(blocks={"free": 2}, links=("prefill-1",)))
    names = [key for key in exported(registry) if key[0] in ("tandem_kv_blocks", "tandem_link_bytes_per_second")]
    assert sorted(names) == [
        ("tandem_kv_blocks", (("state", "free"),)),
        ("tandem_link_bytes_per_second", (("source", "prefill-1"),)),
    ]


def test_the_latest_of_several_statuses_is_exported() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    for number, num_total_blocks in ((1, 100), (2, 100), (3, 50)):
        blocks = {"free": number, "used": 2 * number}
        metrics.observe_status(status(blocks=blocks, links=("prefill-0",), num_total_blocks=num_total_blocks))
    found = exported(registry)
    assert {state: found["tandem_kv_blocks", (("state", state),)] for state in blocks} == blocks
    sizes = [dict(labels)["num_gpu_blocks"] for name, labels in found if name == "vllm:cache_config_info"]
    assert sizes == ["50"]


def test_what_was_not_yet_counted_is_exported_as_zero() -> None:
    """A rate over a series that begins at 1 misses its first event, and a dashboard finds no series at all."""
    registry = CollectorRegistry()
    WorkerMetrics(registry, "demo")
    found = exported(registry)
    for reason in FinishReason:
        labels = (*LABELS[:1], ("finished_reason", reason.value), *LABELS[1:])
        assert found["vllm:request_success_total", labels] == 0
    assert [found["tandem_pins_total", (("outcome", outcome),)] for outcome in ("whole", "part", "none")] == [0, 0, 0]
    events = ("moved", "restored", "broken")
    assert [found["tandem_kv_pinned_blocks_total", (("event", event),)] for event in events] == [0, 0, 0]


def test_a_request_is_counted_and_timed_by_stage() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.observe_request(finished(), FinishReason.STOP)
    found = exported(registry)
    assert found["vllm:request_success_total", (*LABELS[:1], ("finished_reason", "stop"), *LABELS[1:])] == 1
    counted = {
        "prompt_tokens": 40,
        "prefix_cache_queries": 40,
        "prefix_cache_hits": 32,
        "num_preemptions": 2,
    }
    assert {name: found[f"vllm:{name}_total", LABELS] for name in counted} == counted
    timed = {
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "time_to_first_token_seconds": 2.0,
        "request_decode_time_seconds": 3.0,
        "e2e_request_latency_seconds": 5.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_prompt_tokens": 40,
        "request_generation_tokens": 4,
    }
    assert {name: found[f"vllm:{name}_sum", LABELS] for name in timed} == timed


def test_a_request_that_never_ran_is_not_timed() -> None:
    registry = CollectorRegistry()
    unscheduled = finished(first_scheduled_s=None, first_token_s=None, last_token_s=None, num_output_tokens=0)
    WorkerMetrics(registry, "demo").observe_request(unscheduled, FinishReason.ABORT)
    found = exported(registry)
    assert found["vllm:e2e_request_latency_seconds_count", LABELS] == 0
    assert found["vllm:request_queue_time_seconds_count", LABELS] == 0
    assert found["vllm:prefix_cache_queries_total", LABELS] == 0


def test_a_token_that_came_before_there_was_room_takes_no_time_off() -> None:
    """Regression: the sum of prefill times fell, which counts as a restart of the worker where rates are computed."""
    registry = CollectorRegistry()
    early = finished(first_scheduled_s=13.0, first_token_s=12.0)
    WorkerMetrics(registry, "demo").observe_request(early, FinishReason.STOP)
    assert exported(registry)["vllm:request_prefill_time_seconds_sum", LABELS] == 0.0


def test_tokens_of_one_step_share_its_gap() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.observe_tokens(1, None)
    metrics.observe_tokens(2, 0.5)
    found = exported(registry)
    assert found["vllm:generation_tokens_total", LABELS] == 3
    assert found["vllm:inter_token_latency_seconds_count", LABELS] == 2
    assert found["vllm:inter_token_latency_seconds_sum", LABELS] == 0.5


def test_transfers_count_bytes_or_their_failure() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.observe_transfer(4096, 0.25)
    metrics.observe_transfer(4096, 0.25, "expired lease")
    found = exported(registry)
    assert found["tandem_transfer_bytes_total", ()] == 4096
    assert found["tandem_transfer_seconds_count", ()] == 1
    assert found["tandem_transfer_failures_total", (("reason", "expired lease"),)] == 1


def test_reasons_that_a_peer_invents_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    for i in range(100):
        metrics.observe_transfer(0, 0.0, f"reason {i}")
    metrics.observe_transfer(0, 0.0, "reason 0")
    reasons = {key[1][0][1]: value for key, value in exported(registry).items() if key[0].endswith("failures_total")}
    assert len(reasons) == 33
    assert reasons["other"] == 68
    assert reasons["reason 0"] == 2


def test_leases_by_state() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.observe_leases({"active": 2, "expired": 1})
    metrics.observe_leases({"active": 1})
    assert {key[1]: value for key, value in exported(registry).items() if key[0] == "tandem_leases"} == {
        (("state", "active"),): 1
    }


def test_two_workers_live_in_one_process() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    metrics = WorkerMetrics(first, "demo")
    WorkerMetrics(second, "demo")
    metrics.observe_tokens(5, None)
    assert exported(second)["vllm:generation_tokens_total", LABELS] == 0


def test_token_buckets_reach_the_longest_prompt() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, "demo", max_model_len=300)
    bounds = [
        float(dict(labels)["le"]) for name, labels in exported(registry) if name == "vllm:request_prompt_tokens_bucket"
    ]
    assert sorted(bounds) == [1, 2, 5, 10, 20, 50, 100, 200, 500, float("inf")]


def test_pins_are_counted_by_what_was_granted_and_pinned_blocks_by_what_became_of_them() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    asked = (Pin(17, 60.0), Pin(32, 60.0), Pin(100, 60.0), Pin(16, 60.0))
    granted = tuple(Pin(num_tokens, 60.0) for num_tokens in (16, 16, 32, 0))
    metrics.observe_pins(asked, finished(num_prompt_tokens=40, pins=granted), 16)
    metrics.observe_pins(asked, finished(num_prompt_tokens=40, pins=()), 16)
    metrics.observe_promised(PromisedUsage(num_host=3, num_moved=5, num_restored=2), 1000)
    metrics.observe_promised(PromisedUsage(num_host=2, num_moved=6, num_restored=2, num_broken=1), 1000)
    found = exported(registry)
    outcomes = {outcome: found["tandem_pins_total", (("outcome", outcome),)] for outcome in ("whole", "part", "none")}
    assert outcomes == {"whole": 2, "part": 1, "none": 1}
    events = {e: found["tandem_kv_pinned_blocks_total", (("event", e),)] for e in ("moved", "restored", "broken")}
    assert events == {"moved": 6, "restored": 2, "broken": 1}
    assert found["tandem_kv_host_bytes", ()] == 2000
    assert found["tandem_kv_block_bytes", ()] == 1000


def test_bytes_read_are_those_since_the_start() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    for total in (0.0, 300.0, 300.0, 5000.0):
        metrics.observe_reads(total)
    assert exported(registry)["tandem_state_read_bytes_total", ()] == 5000


def test_rows_of_experts_are_those_since_the_start() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    for rows in (ExpertRows((3, 5), 5), ExpertRows((3, 5), 5), ExpertRows((10, 6), 12)):
        metrics.observe_experts(rows)
    found = exported(registry)
    assert [found["tandem_expert_rows_total", (("rank", rank),)] for rank in "01"] == [10, 6]
    assert found["tandem_busiest_expert_rows_total", ()] == 12


def test_state_that_requests_hold_is_told_with_its_pages() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo")
    for num_bytes in (4000, 300):
        metrics.observe_held(num_bytes, 2 * num_bytes)
    found = {of: exported(registry)["tandem_state_held_bytes", (("of", of),)] for of in ("state", "pages")}
    assert found == {"state": 300, "pages": 600}


def test_drafts_are_counted_by_position_and_tokens_by_step() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "demo", max_drafts=3)

    def by_position(name: str) -> list[float]:
        found = exported(registry)
        return [found[f"{name}_total", (*LABELS, ("position", str(position)))] for position in range(3)]

    assert by_position("tandem_draft_tokens_per_pos") == [0, 0, 0]
    metrics.observe_drafts(DraftCounts(4, (2, 1), (1, 0)))
    metrics.observe_drafts(DraftCounts(10, (6, 4), (3, 1), -0.5))
    found = exported(registry)
    totals = {name: found[f"vllm:spec_decode_num_{name}_total", LABELS] for name in ("drafts", "draft_tokens")}
    assert totals == {"drafts": 6, "draft_tokens": 10}
    assert found["vllm:spec_decode_num_accepted_tokens_total", LABELS] == 4
    assert found["tandem_draft_saved_seconds", LABELS] == -0.5
    assert by_position("vllm:spec_decode_num_accepted_tokens_per_pos") == [3, 1, 0]
    assert by_position("tandem_draft_tokens_per_pos") == [6, 4, 0]
    buckets = [found["tandem_tokens_per_step_bucket", tuple(sorted((*LABELS, ("le", end))))] for end in BUCKET_ENDS]
    assert buckets == [7, 9, 10, 10, 10]
    assert (found["tandem_tokens_per_step_count", LABELS], found["tandem_tokens_per_step_sum", LABELS]) == (10, 14)
