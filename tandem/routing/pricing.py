"""Vectorised form of `cost`: its terms for all workers at once, and lower bounds for pairs.

A way is a manner of computing a prompt on a worker: alone, or after fetching its prefix from a certain holder. A choice
is a `Placement`: a prefill worker with its way, and a decode worker. The last dimension of arrays is the row of a
worker table. Invariant: up to rounding, values equal those of `cost` and bounds never exceed them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.routing.candidates import WorkerSnapshot, num_blocks_of, num_cached_blocks
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.snapshot import Links, LinkState, RequestShape
from tandem.routing.worker_table import Columns, Floats, WorkerTable


@dataclass(frozen=True, slots=True)
class PrefillWays:
    """Times of all ways to compute a prompt on each worker.

    Args:
        holders: worker that each way fetches from; None = the way without a fetch.
        ttft_ms: [num_ways, num_workers], time to the first token with the staleness penalty; infinite if not
            admissible.
        prefill_ms: [num_ways, num_workers], the part of it spent computing, during which the hand-off already runs.
    """

    holders: Sequence[WorkerSnapshot | None]
    ttft_ms: Floats
    prefill_ms: Floats


def wait_ms(columns: Columns, now_s: float) -> Floats:
    """`WorkerSnapshot.wait_ms` of every worker. [num_workers]"""
    return np.maximum(0.0, 1000.0 * (columns.free_at_s - now_s))


def decode_ms(request: RequestShape, eligible: EligibleWorkers, now_s: float) -> Floats:
    """Cost of decoding on each worker with its staleness penalty, infinite for barred workers. [num_workers]"""
    columns = eligible.columns
    context_ms = columns.decode_ms_per_context_token * (request.num_tokens + request.num_expected_output / 2)
    step_ms = columns.joined_step_ms + context_ms
    token_ms = step_ms + columns.num_running * (columns.decode_ms_per_request + context_ms)
    if request.max_tpot_ms is not None:
        token_ms += (columns.num_running + 1) * np.maximum(0.0, step_ms - request.max_tpot_ms)
    return eligible.forbid(request.num_expected_output * token_ms + _staleness_ms(columns, now_s))


def ways_of(
    request: RequestShape,
    eligible: EligibleWorkers,
    sources: Sequence[WorkerSnapshot],
    links: Links,
    now_s: float,
    max_ttft_ms: float,
) -> PrefillWays:
    """All ways on all prefill workers; those with a first token later than `max_ttft_ms` are not admissible."""
    columns, held_blocks = eligible.columns, eligible.cached_blocks(request)
    queue_ms, computing_ms = (
        wait_ms(columns, now_s),
        _prompt_ms(columns, request.num_tokens, held_blocks * eligible.block_size),
    )
    holders: list[WorkerSnapshot | None] = [None]
    ttfts_ms, prefills_ms = [queue_ms + computing_ms], [computing_ms]
    for source in sources:
        num_blocks = num_cached_blocks(request, source.worker)
        has_less = held_blocks < num_blocks
        if not has_less.any():
            continue
        byte_ms, latency_ms = _link_columns(eligible.table, links.out_of(source.worker_id), links.default)
        num_bytes = columns.request_bytes + columns.block_bytes * (num_blocks - held_blocks)
        fetch_ms = latency_ms + num_bytes * byte_ms
        rest_ms = _prompt_ms(columns, request.num_tokens, float(num_blocks * eligible.block_size))
        ttfts_ms.append(np.where(has_less, np.maximum(queue_ms, fetch_ms) + rest_ms, np.inf))
        prefills_ms.append(rest_ms)
        holders.append(source)
    ttft_ms = np.array(ttfts_ms)
    ttft_ms[ttft_ms > max_ttft_ms] = np.inf
    return PrefillWays(holders, eligible.forbid(ttft_ms + _staleness_ms(columns, now_s)), np.array(prefills_ms))


class HandOffCosts:
    """Costs of decode workers including the hand-off (`exposed_ms`) of the blocks they lack.

    costs_ms: `decode_ms` of each worker; set to infinity once a worker has been considered. [num_decodes]
    """

    def __init__(self, request: RequestShape, decodes: EligibleWorkers, held_blocks: Floats, costs_ms: Floats) -> None:
        self._decodes = decodes
        self._num_lacking = num_blocks_of(request.num_tokens, decodes.block_size) - held_blocks
        self.costs_ms = costs_ms

    def least_ms(self, ways: PrefillWays, least_chunk_blocks: float) -> Floats:
        """Lower bound of each decode worker's cost, over its best link and the best way. [num_decodes]"""
        columns = self._decodes.columns
        byte_ms = 1000.0 / columns.best_bytes_per_s
        block_ms, once_ms = columns.block_bytes * byte_ms, columns.request_bytes * byte_ms
        last_ms = ways.ttft_ms.min() + block_ms * np.minimum(self._num_lacking, least_chunk_blocks)
        whole_ms = (ways.ttft_ms - ways.prefill_ms).min() + block_ms * self._num_lacking
        least_ms: Floats = np.maximum(last_ms, whole_ms)
        return self.costs_ms + columns.best_latency_ms + once_ms + least_ms

    def into(self, row: int, prefills: EligibleWorkers, ways: PrefillWays, links: Links) -> Floats:
        """Total cost of the choices with the decode worker of `row`. [num_ways, num_prefills]"""
        decode, num_lacking = self._decodes.table.snapshots[row], self._num_lacking[row]
        byte_ms, latency_ms = _link_columns(prefills.table, links.into(decode.worker_id), links.default)
        block_ms = decode.worker.block_bytes * byte_ms
        last_ms = block_ms * np.minimum(num_lacking, prefills.columns.chunk_blocks)
        once_ms = latency_ms + decode.worker.request_bytes * byte_ms
        exposed_ms = once_ms + np.maximum(last_ms, block_ms * num_lacking - ways.prefill_ms)
        return _without(prefills, decode, exposed_ms + ways.ttft_ms + self.costs_ms[row])

    def out_of(self, row: int, prefills: EligibleWorkers, ways: PrefillWays, links: Links) -> Floats:
        """Total cost of the choices with the prefill worker of `row`. [num_ways, num_decodes]"""
        prefill, num_lacking = prefills.table.snapshots[row], self._num_lacking
        byte_ms, latency_ms = _link_columns(self._decodes.table, links.out_of(prefill.worker_id), links.default)
        columns = self._decodes.columns
        block_ms, once_ms = columns.block_bytes * byte_ms, latency_ms + columns.request_bytes * byte_ms
        last_ms = block_ms * np.minimum(num_lacking, prefills.columns.chunk_blocks[row])
        exposed_ms = once_ms + np.maximum(last_ms, block_ms * num_lacking - ways.prefill_ms[:, row, None])
        return _without(self._decodes, prefill, exposed_ms + ways.ttft_ms[:, row, None] + self.costs_ms)


def local_ms(
    request: RequestShape, decodes: EligibleWorkers, held_blocks: Floats, costs_ms: Floats, now_s: float
) -> tuple[Floats, Floats]:
    """(Time to the first token, total cost) if each decode worker computes the prompt itself. Each [num_decodes]."""
    columns = decodes.columns
    prefill_ms = _prompt_ms(columns, request.num_tokens, held_blocks * decodes.block_size)
    ttft_ms = wait_ms(columns, now_s) + prefill_ms
    num_delayed = np.maximum(0.0, columns.num_running - columns.num_awaiting_kv)
    stall_ms = num_delayed * np.maximum(0.0, prefill_ms - columns.prefill_ms_per_request)
    return ttft_ms, ttft_ms + costs_ms + stall_ms


def _staleness_ms(columns: Columns, now_s: float) -> Floats | float:
    """`WorkerSnapshot.staleness_ms` of every worker; the number 0 if all reports are recent."""
    if now_s <= columns.stale_from_s.min(initial=np.inf):
        return 0.0
    return np.maximum(0.0, 1000.0 * (now_s - columns.stale_from_s))


def _prompt_ms(columns: Columns, num_tokens: int, num_cached_tokens: Floats | float) -> Floats:
    """`PrefillSpeed.prompt_ms` of every worker."""
    missing = num_tokens - num_cached_tokens
    pairs = missing * (num_cached_tokens + missing / 2)
    return columns.prefill_ms_per_request + columns.prefill_ms_per_token * missing + columns.prefill_ms_per_pair * pairs


def _link_columns(
    table: WorkerTable, measured: Mapping[str, LinkState], default: LinkState
) -> tuple[Floats | float, Floats | float]:
    """(Milliseconds per byte, latency) between one worker and each of a table; plain numbers if none was measured."""
    byte_ms = 1000.0 / default.bytes_per_s
    if not measured:
        return byte_ms, default.latency_ms
    byte_times = {worker_id: 1000.0 / link.bytes_per_s for worker_id, link in measured.items()}
    latencies = {worker_id: link.latency_ms for worker_id, link in measured.items()}
    return table.scattered(byte_times, byte_ms), table.scattered(latencies, default.latency_ms)


def _without(eligible: EligibleWorkers, snapshot: WorkerSnapshot, costs_ms: Floats) -> Floats:
    """Returns `costs_ms` with that of `snapshot` set to infinity: no worker hands over to itself."""
    row = eligible.table.row_of(snapshot.worker_id)
    if row is not None:
        costs_ms[:, row] = np.inf
    return costs_ms
