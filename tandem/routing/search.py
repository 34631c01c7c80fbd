"""The cheapest choice, exactly, without pricing every pair of prefill and decode worker.

A choice's cost is a part of prefill, a part of decode and a part of their link. Both sides are sorted by lower bounds
that assume the best link; pairs are visited in that order until no bound can beat the best found. Never chooses what
the candidates' limits forbid; ties go to the worker whose turn is longest ago.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tandem.routing.cost import exposed_ms, full_fetch_ms, stall_ms, step_parts_ms
from tandem.routing.snapshot import RequestShape, Role
from tandem.routing.standing import Candidates, Choice, Standing, num_blocks_of, num_cached_tokens

DEFAULT_FETCH_SOURCES = 4
_MAX_PAIRS = 8192  # NOTE: bounds one decision when links are wildly uneven; past it the best so far is taken


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to the first token. `prefill_ms`: its last part, during which the hand-off goes on."""

    holder: Standing | None
    ttft_ms: float
    prefill_ms: float


def cheapest(
    request: RequestShape, candidates: Candidates, num_fetch_sources: int = DEFAULT_FETCH_SOURCES
) -> Choice | None:
    """The admissible choice of least predicted cost, or None when the limits forbid every one.

    A prefix may be fetched from the `num_fetch_sources` workers that hold most of it.
    """
    return _Search(request, candidates, num_fetch_sources).run()


class _Search:
    """One decision. Workers are named by their index among the candidates; an infinite bound rules one out."""

    def __init__(self, request: RequestShape, candidates: Candidates, num_fetch_sources: int) -> None:
        self._request = request
        self._candidates = candidates
        self._sources = _fetch_sources(request, candidates, num_fetch_sources)
        self._least_chunk_tokens = min([s.worker.chunk_tokens for s in candidates.prefill], default=0)
        self._best: Choice | None = None
        self._best_ms = float("inf")
        self._num_pairs = 0

    def run(self) -> Choice | None:
        if not self._candidates.decode:
            return None
        costs_ms, bounds_ms = self._price_decodes()
        if self._candidates.prefill:
            self._try_pairs(self._bound_prefills(), bounds_ms, costs_ms)
        self._try_local(costs_ms, self._candidates.max_local_tokens)
        if self._best is None:
            self._try_local(costs_ms, self._request.num_tokens)
        return self._best

    def _try_pairs(self, prefill_ms: list[float], decode_ms: list[float], costs_ms: list[float]) -> None:
        """Visit pairs by rising bounds, once the likeliest pair has shown which bounds are worth sorting."""
        least_prefill_ms, least_decode_ms = min(prefill_ms), min(decode_ms)
        first = decode_ms.index(least_decode_ms)
        self._try_decodes(prefill_ms.index(least_prefill_ms), [(least_decode_ms, 0, first)], costs_ms)
        limit_ms = self._best_ms * (1 + 1e-9)  # NOTE: it is visited again below, in the order that is fair among equals
        self._best, self._best_ms = None, float("inf")
        prefills = _shortlist(self._candidates.prefill, prefill_ms, limit_ms - least_decode_ms)
        decodes = _shortlist(self._candidates.decode, decode_ms, limit_ms - least_prefill_ms)
        for bound_ms, _, index in prefills:
            if bound_ms + least_decode_ms >= self._best_ms or self._num_pairs > _MAX_PAIRS:
                return
            self._try_decodes(index, decodes, costs_ms)

    def _try_decodes(self, index: int, decodes: list[tuple[float, int, int]], costs_ms: list[float]) -> None:
        """Complete each plan of one prefill worker with the decode worker that suits it."""
        request, links, candidates = self._request, self._candidates.links, self._candidates
        prefill = candidates.prefill[index]
        stale_ms = prefill.staleness_ms(candidates.now_s)
        for plan in self._plans(prefill, stale_ms + decodes[0][0]):
            spent_ms = plan.ttft_ms + stale_ms
            for bound_ms, _, number in decodes:
                if spent_ms + bound_ms >= self._best_ms:
                    break
                decode = candidates.decode[number]
                if decode.worker_id == prefill.worker_id:
                    continue
                self._num_pairs += 1
                link = links.between(prefill.worker_id, decode.worker_id)
                total_ms = spent_ms + costs_ms[number] + exposed_ms(request, prefill, decode, link, plan.prefill_ms)
                if total_ms < self._best_ms:
                    self._best_ms, self._best = total_ms, Choice(prefill, decode, plan.holder)

    def _try_local(self, costs_ms: list[float], max_tokens: int) -> None:
        """Let decode compute the prompt: what it lacks must be short, unless that is its role too."""
        request, now_s = self._request, self._candidates.now_s
        for cost_ms, _, index in _shortlist(self._candidates.decode, costs_ms, self._best_ms):
            decode = self._candidates.decode[index]
            num_cached = num_cached_tokens(request, decode.worker)
            if request.num_tokens - num_cached > max_tokens and decode.worker.role is not Role.BOTH:
                continue
            prefill_ms = decode.speed.prefill.prompt_ms(request.num_tokens, num_cached)
            ttft_ms = decode.wait_ms(now_s) + prefill_ms
            total_ms = ttft_ms + cost_ms + stall_ms(decode, prefill_ms)
            if ttft_ms <= self._candidates.max_ttft_ms and total_ms < self._best_ms:
                self._best_ms, self._best = total_ms, Choice(None, decode)

    def _price_decodes(self) -> tuple[list[float], list[float]]:
        """(What decoding costs at each decode worker, the same with the least hand-off). Inlines `decoding_ms`."""
        request, now_s, links = self._request, self._candidates.now_s, self._candidates.links
        best_into, default = links.best_into, links.default
        num_output = request.num_expected_output
        max_step_ms = float("inf") if request.max_tpot_ms is None else request.max_tpot_ms
        leading, last_bytes, speed, context_ms, longer_ms = request.leading_blocks, dict[int, int](), None, 0.0, 0.0
        costs, bounds = [], []
        for decode in self._candidates.decode:
            if decode.speed is not speed:
                speed = decode.speed
                context_ms, longer_ms = step_parts_ms(request, speed.decode)
            step_ms = decode.joined_step_ms + context_ms
            cost_ms = num_output * (step_ms + decode.num_running * longer_ms)
            if step_ms > max_step_ms:
                cost_ms += num_output * (decode.num_running + 1) * (step_ms - max_step_ms)
            if now_s > decode.stale_from_s:
                cost_ms += decode.staleness_ms(now_s)
            held = leading.get(decode.worker_id, 0)
            num_bytes = last_bytes.get(held)
            if num_bytes is None:
                num_bytes = last_bytes[held] = self._last_bytes(decode)
            link = best_into.get(decode.worker_id, default)
            costs.append(cost_ms)
            bounds.append(cost_ms + link.latency_ms + 1000.0 * num_bytes / link.bytes_per_s)
        return costs, bounds

    def _last_bytes(self, decode: Standing) -> int:
        """The smallest last chunk: no prefill worker exposes less."""
        num_lacking = self._request.num_tokens - self._held(decode)
        num_blocks = num_blocks_of(min(self._least_chunk_tokens, num_lacking), decode.worker.block_size)
        return num_blocks * decode.worker.block_bytes

    def _bound_prefills(self) -> list[float]:
        """The least time to the first token at each prefill worker, with the best fetch there could be."""
        now_s, max_ttft_ms, links = self._candidates.now_s, self._candidates.max_ttft_ms, self._candidates.links
        best_into, default = links.best_into, links.default
        leading, known, speed = self._request.leading_blocks, dict[int, tuple[float, int, float]](), None
        bounds = []
        for prefill in self._candidates.prefill:
            if prefill.speed is not speed:
                speed, known = prefill.speed, {}
            held = leading.get(prefill.worker_id, 0)
            found = known.get(held)
            if found is None:
                found = known[held] = self._bounds(prefill)
            prefill_ms, fetch_bytes, fetched_ms = found
            wait_ms = 1000.0 * (prefill.free_at_s - now_s)
            if wait_ms < 0.0:
                wait_ms = 0.0
            ttft_ms = wait_ms + prefill_ms
            if fetch_bytes:
                link = best_into.get(prefill.worker_id, default)
                fetch_ms = link.latency_ms + 1000.0 * fetch_bytes / link.bytes_per_s
                fetch_ms = (wait_ms if wait_ms > fetch_ms else fetch_ms) + fetched_ms
                ttft_ms = fetch_ms if fetch_ms < ttft_ms else ttft_ms
            if ttft_ms > max_ttft_ms:
                ttft_ms = float("inf")
            elif now_s > prefill.stale_from_s:
                ttft_ms += prefill.staleness_ms(now_s)
            bounds.append(ttft_ms)
        return bounds

    def _bounds(self, prefill: Standing) -> tuple[float, int, float]:
        """The prompt's time with what is cached, the fewest bytes any fetch moves, and the least time after one."""
        num_tokens, speed, num_held = self._request.num_tokens, prefill.speed.prefill, self._held(prefill)
        prefill_ms = speed.prompt_ms(num_tokens, num_held)
        longer = [num_more for _, num_more in self._sources if num_more > num_held]
        if not longer:
            return prefill_ms, 0, prefill_ms
        num_blocks = (min(longer) - num_held) // prefill.worker.block_size
        return prefill_ms, num_blocks * prefill.worker.block_bytes, speed.prompt_ms(num_tokens, max(longer))

    def _plans(self, prefill: Standing, further_ms: float) -> Iterator[_Plan]:
        """Compute what is missing, or fetch some of it from a peer first; only what is in time, and may still be the
        cheapest when `further_ms` are the least that follow.
        """
        num_tokens, speed, max_ttft_ms = self._request.num_tokens, prefill.speed.prefill, self._candidates.max_ttft_ms
        wait_ms, num_held = prefill.wait_ms(self._candidates.now_s), self._held(prefill)
        prefill_ms = speed.prompt_ms(num_tokens, num_held)
        if wait_ms + prefill_ms <= max_ttft_ms and wait_ms + prefill_ms + further_ms < self._best_ms:
            yield _Plan(None, wait_ms + prefill_ms, prefill_ms)
        for holder, num_more in self._sources:
            if num_more <= num_held:
                continue
            prefill_ms = speed.prompt_ms(num_tokens, num_more)
            if wait_ms + prefill_ms + further_ms >= self._best_ms:
                continue
            link = self._candidates.links.between(holder.worker_id, prefill.worker_id)
            start_ms = max(wait_ms, full_fetch_ms(self._request, prefill, holder, link))
            if start_ms + prefill_ms <= max_ttft_ms:
                yield _Plan(holder, start_ms + prefill_ms, prefill_ms)

    def _held(self, standing: Standing) -> int:
        return num_cached_tokens(self._request, standing.worker)


def _shortlist(standings: Sequence[Standing], bounds_ms: list[float], limit_ms: float) -> list[tuple[float, int, int]]:
    """(Bound, turn, index) of those whose bound is within the limit, lowest first."""
    listed = [(bound, standings[i].turn, i) for i, bound in enumerate(bounds_ms) if bound <= limit_ms]
    listed.sort()
    return listed


def _fetch_sources(request: RequestShape, candidates: Candidates, num_sources: int) -> list[tuple[Standing, int]]:
    """Those that hold most of the prefix, with their cached tokens."""
    if num_sources < 1:
        return []
    holders, oldest_s = candidates.holders, candidates.oldest_s

    def is_alive(item: tuple[str, int]) -> bool:
        return item[0] in holders and holders[item[0]].reported_at_s >= oldest_s

    held = request.leading_blocks.items()
    longest = heapq.nlargest(num_sources, held, key=itemgetter(1))
    if not all(map(is_alive, longest)):
        longest = heapq.nlargest(num_sources, filter(is_alive, held), key=itemgetter(1))
    return [(holders[worker_id], num_cached_tokens(request, holders[worker_id].worker)) for worker_id, _ in longest]
