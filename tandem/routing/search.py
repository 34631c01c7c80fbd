"""Finds the cheapest choice (`Placement`), exactly, without pricing every pair of prefill and decode worker.

A choice's cost is the sum of a prefill part, a decode part and a part for their link. Alternately, the most promising
decode worker is priced with all prefill workers, and the most promising prefill worker with all decode workers; each
is then removed. The search ends when no lower bound of the remaining workers, over the best links, is below the best
cost found. Never exceeds the candidates' limits; ties go to the worker chosen longest ago.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tandem.routing.candidates import Candidates, Placement, WorkerSnapshot
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.pricing import HandOffCosts, PrefillWays, decode_ms, local_ms, ways_of
from tandem.routing.snapshot import RequestShape
from tandem.routing.worker_table import Floats

DEFAULT_FETCH_SOURCES = 4  # workers from which fetching a prefix is considered
SHORT_TOKENS = 32  # NOTE: two blocks; a step that reads all weights for its streams hardly grows by them
_MAX_VISITS = 512  # NOTE: bounds one decision when links are wildly uneven; past it the best so far is taken
_ROUNDING = 1 - 1e-12  # NOTE: bounds add up in another order than costs


def cheapest(
    request: RequestShape, candidates: Candidates, num_fetch_sources: int = DEFAULT_FETCH_SOURCES
) -> Placement | None:
    """Returns the admissible choice of least predicted cost, or None if there is none.

    A prefix may be fetched from the `num_fetch_sources` workers that hold most of it. A prompt of at most
    `SHORT_TOKENS` is prefilled by a separate worker only if no decode worker may compute it.
    """
    return _Search(request, candidates, num_fetch_sources).run() if candidates.decode else None


class _Search:
    """Search for one decision. Workers are referred to by table row; an infinite cost excludes one."""

    def __init__(self, request: RequestShape, candidates: Candidates, num_fetch_sources: int) -> None:
        self._request = request
        self._candidates = candidates
        self._num_fetch_sources = num_fetch_sources
        self._prefills = EligibleWorkers.of(candidates.prefill, candidates.links)
        self._decodes = EligibleWorkers.of(candidates.decode, candidates.links)
        self._held_blocks = self._decodes.cached_blocks(request)
        self._decode_ms = decode_ms(request, self._decodes, candidates.now_s)
        self._best: Placement | None = None
        self._best_ms = float("inf")

    def run(self) -> Placement | None:
        is_short = self._request.num_tokens <= SHORT_TOKENS
        if not is_short:
            self._try_pairs()
        self._try_local(self._candidates.max_local_tokens)
        if is_short and self._best is None:
            self._try_pairs()
        if self._best is None:
            self._try_local(self._request.num_tokens)
        return self._best

    def _try_pairs(self) -> None:
        if not self._prefills:
            return
        request, found = self._request, self._candidates
        sources = _fetch_sources(request, found, self._num_fetch_sources)
        ways = ways_of(request, self._prefills, sources, found.links, found.now_s, found.max_ttft_ms)
        hand_off = HandOffCosts(request, self._decodes, self._held_blocks, self._decode_ms.copy())
        least_chunk_blocks = self._prefills.columns.chunk_blocks.min()
        for visit in range(_MAX_VISITS):
            bounds_ms = hand_off.least_ms(ways, least_chunk_blocks)
            row = self._decodes.first(bounds_ms)
            if bounds_ms[row] >= self._best_ms * _ROUNDING:
                return
            if visit % 2 == 0:
                self._visit_decode(row, ways, hand_off)
            else:
                self._visit_prefill(self._prefills.first(ways.ttft_ms.min(axis=0)), ways, hand_off)

    def _visit_decode(self, row: int, ways: PrefillWays, hand_off: HandOffCosts) -> None:
        totals_ms = hand_off.into(row, self._prefills, ways, self._candidates.links)
        prefill = self._prefills.first(totals_ms.min(axis=0))
        self._keep(totals_ms[:, prefill], prefill, row, ways)
        hand_off.costs_ms[row] = np.inf

    def _visit_prefill(self, row: int, ways: PrefillWays, hand_off: HandOffCosts) -> None:
        totals_ms = hand_off.out_of(row, self._prefills, ways, self._candidates.links)
        decode = self._decodes.first(totals_ms.min(axis=0))
        self._keep(totals_ms[:, decode], row, decode, ways)
        ways.ttft_ms[:, row] = np.inf

    def _keep(self, totals_ms: Floats, prefill: int, decode: int, ways: PrefillWays) -> None:
        """Make the pair's cheapest way the best choice if it costs less."""
        way = int(totals_ms.argmin())
        if totals_ms[way] < self._best_ms * _ROUNDING:
            self._best_ms = float(totals_ms[way])
            snapshots = self._prefills.table.snapshots[prefill], self._decodes.table.snapshots[decode]
            self._best = Placement(*snapshots, ways.holders[way])

    def _try_local(self, max_tokens: int) -> None:
        """Consider decode workers that compute the prompt themselves: those that lack at most `max_tokens` of it, and
        those whose role includes prefill.
        """
        request, eligible, candidates = self._request, self._decodes, self._candidates
        least_blocks = (request.num_tokens - max_tokens) / eligible.block_size
        forbidden = (self._held_blocks < least_blocks) & (eligible.columns.does_both == 0)
        if forbidden.all():
            return
        ttft_ms, total_ms = local_ms(request, eligible, self._held_blocks, self._decode_ms, candidates.now_s)
        total_ms[forbidden | (ttft_ms > candidates.max_ttft_ms)] = np.inf
        row = eligible.first(total_ms)
        if total_ms[row] < self._best_ms * _ROUNDING:
            self._best_ms, self._best = float(total_ms[row]), Placement(None, eligible.table.snapshots[row])


def _fetch_sources(request: RequestShape, candidates: Candidates, num_sources: int) -> list[WorkerSnapshot]:
    """Returns the live workers that hold most of the prefix."""
    holders, oldest_s = candidates.holders, candidates.oldest_s
    if num_sources < 1 or not request.leading_blocks:
        return []

    def is_alive(worker_id: str) -> bool:
        return worker_id in holders and holders[worker_id].reported_at_s >= oldest_s

    names = list(request.leading_blocks)
    longest = _longest(names, request.leading_blocks, num_sources)
    if not all(map(is_alive, longest)):
        longest = _longest(list(filter(is_alive, names)), request.leading_blocks, num_sources)
    return [holders[worker_id] for worker_id in longest]


def _longest(names: Sequence[str], num_blocks: Mapping[str, int], num_wanted: int) -> Sequence[str]:
    if len(names) <= num_wanted:
        return names
    counts = np.fromiter(map(num_blocks.__getitem__, names), np.float64, len(names))
    return [names[i] for i in np.argpartition(counts, -num_wanted)[-num_wanted:]]
