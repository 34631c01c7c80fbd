"""Cost of a pairing, in milliseconds: the definition that `search` minimises and decision records keep.

The cost is this request's own time plus the delays it causes to the requests it joins, summed over them. More cached
tokens never raise the cost, and a slower link never lowers it.
"""

from dataclasses import dataclass

from tandem.routing.candidates import Placement, WorkerSnapshot, num_blocks_of, num_cached_blocks, num_cached_tokens
from tandem.routing.snapshot import Links, LinkState, RequestShape
from tandem.routing.speed import DecodeSpeed


@dataclass(frozen=True, slots=True)
class Prediction:
    """Terms of a choice's predicted cost. Queue, fetch and prefill add up to the time to the first token.

    Args:
        fetch_ms: the part of a remote prefix's fetch that outlasts the queue.
        transfer_ms: the part of the KV hand-off that outlasts prefill.
        decode_ms: the request's own decoding.
        slowdown_ms: delays of requests already on the workers, and the penalty for TPOT objectives missed.
        staleness_ms: penalty for old reports.
    """

    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    slowdown_ms: float
    staleness_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.fetch_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.ttft_ms + self.transfer_ms + self.decode_ms + self.slowdown_ms + self.staleness_ms


def predict(request: RequestShape, choice: Placement, links: Links, now_s: float) -> Prediction:
    """Price one choice."""
    worker = choice.prefill or choice.decode
    queue_ms = worker.wait_ms(now_s)
    num_cached = num_cached_tokens(request, worker.worker)
    fetch_ms = 0.0
    if choice.holder is not None:
        num_cached = num_cached_tokens(request, choice.holder.worker)
        link = links.between(choice.holder.worker_id, worker.worker_id)
        fetch_ms = max(0.0, full_fetch_ms(request, worker, choice.holder, link) - queue_ms)
    prefill_ms = worker.speed.prefill.prompt_ms(request.num_tokens, num_cached)
    own_ms, slowdown_ms = decoding_ms(request, choice.decode)
    transfer_ms = 0.0
    staleness_ms = choice.decode.staleness_ms(now_s)
    if choice.prefill is None:
        slowdown_ms += stall_ms(choice.decode, prefill_ms)
    else:
        link = links.between(choice.prefill.worker_id, choice.decode.worker_id)
        transfer_ms = exposed_ms(request, choice.prefill, choice.decode, link, prefill_ms)
        staleness_ms += choice.prefill.staleness_ms(now_s)
    return Prediction(queue_ms, fetch_ms, prefill_ms, transfer_ms, own_ms, slowdown_ms, staleness_ms)


def full_fetch_ms(request: RequestShape, worker: WorkerSnapshot, holder: WorkerSnapshot, link: LinkState) -> float:
    """Time to fetch the prefix blocks that `holder` has and `worker` lacks, part of which may overlap with queueing."""
    num_blocks = num_cached_blocks(request, holder.worker) - num_cached_blocks(request, worker.worker)
    return link.ms(worker.worker.request_bytes + num_blocks * worker.worker.block_bytes)


def exposed_ms(
    request: RequestShape, prefill: WorkerSnapshot, decode: WorkerSnapshot, link: LinkState, prefill_ms: float
) -> float:
    """Time of the hand-off after prefill ends: that of the last chunk and of what is sent once, when the prompt is
    computed, or more if the link is slower than prefill.
    """
    block_size = decode.worker.block_size
    num_lacking = num_blocks_of(request.num_tokens, block_size) - num_cached_blocks(request, decode.worker)
    num_last = min(num_lacking, num_blocks_of(prefill.worker.chunk_tokens, block_size))
    num_bytes, num_once = decode.worker.block_bytes, decode.worker.request_bytes
    whole_ms = link.ms(num_once + num_lacking * num_bytes) - prefill_ms
    return max(link.ms(num_once + num_last * num_bytes), whole_ms)


def decoding_ms(request: RequestShape, decode: WorkerSnapshot) -> tuple[float, float]:
    """(Time of the request's own decoding in the batch it joins, total delay of the requests already in that batch).

    The request lengthens every step of the batch while it runs. A step beyond its TPOT objective adds the excess once
    per request in the batch.
    """
    context_ms, longer_ms = step_parts_ms(request, decode.speed.decode)
    step_ms = decode.joined_step_ms + context_ms
    slowdown_ms = decode.num_running * longer_ms
    if request.max_tpot_ms is not None and step_ms > request.max_tpot_ms:
        slowdown_ms += (decode.num_running + 1) * (step_ms - request.max_tpot_ms)
    return request.num_expected_output * step_ms, request.num_expected_output * slowdown_ms


def step_parts_ms(request: RequestShape, speed: DecodeSpeed) -> tuple[float, float]:
    """(Time the request's context adds to a step, time the whole request adds), at its mean context length."""
    context_ms = speed.ms_per_context_token * (request.num_tokens + request.num_expected_output / 2)
    return context_ms, speed.ms_per_request + context_ms


def stall_ms(decode: WorkerSnapshot, prefill_ms: float) -> float:
    """Total delay of a decode batch by a prompt computed on the same worker, without the overhead of a step, which the
    batch pays anyway. Requests that wait for their KV are not in the batch yet.
    """
    num_delayed = max(0, decode.num_running - decode.num_awaiting_kv)
    return num_delayed * max(0.0, prefill_ms - decode.speed.prefill.ms_per_request)
