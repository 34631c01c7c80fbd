"""Published formulas of other routers as policies, for comparison in benchmarks only.

Each chooses the prefill worker by its formula and the decode worker by load. If a source is ambiguous, the class
states the interpretation.
"""

from tandem.routing.candidates import Candidates, Placement, WorkerSnapshot, num_cached_tokens
from tandem.routing.policies import decode_load, in_time, least, pair_of
from tandem.routing.snapshot import RequestShape


class DynamoLinear:
    """Dynamo: the minimum of `prefill_blocks_left + decode_blocks + incoming_blocks`.

    `decode_blocks` of a prefill worker is interpreted as the blocks of the requests it holds.
    """

    name = "dynamo linear"

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        def cost(snapshot: WorkerSnapshot) -> float:
            return snapshot.queued.num_tokens + snapshot.num_context_tokens + _incoming(request, snapshot)

        prefill = least(in_time(request, candidates), cost)
        return pair_of(request, candidates, prefill, decode_load)


class DynamoProduct:
    """Dynamo's "lmetric": the minimum of `prefill_left * (decode_blocks + 1)`, incoming prompt included."""

    name = "lmetric"

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        def cost(snapshot: WorkerSnapshot) -> float:
            num_left = snapshot.queued.num_tokens + _incoming(request, snapshot)
            return num_left * (snapshot.num_context_tokens / snapshot.worker.block_size + 1)

        prefill = least(in_time(request, candidates), cost)
        return pair_of(request, candidates, prefill, decode_load)


class WeightedScores:
    """llm-d: weighted sum of scores in [0, 1]: cached share, free KV share, shortness of the queue (min-max)."""

    def __init__(self, prefix: float = 3.0, free: float = 2.0, queue: float = 2.0) -> None:
        self.name = f"llm-d {prefix:g}/{free:g}/{queue:g}"
        self._weights = (prefix, free, queue)

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        snapshots = in_time(request, candidates)
        lengths = [snapshot.queued.num_requests for snapshot in snapshots]
        shortest, spread = min(lengths, default=0.0), max(lengths, default=0.0) - min(lengths, default=0.0)
        prefix_weight, free_weight, queue_weight = self._weights

        def negated(snapshot: WorkerSnapshot) -> float:
            cached = num_cached_tokens(request, snapshot.worker) / request.num_tokens
            free = snapshot.num_free_blocks / snapshot.num_total_blocks
            short = 1.0 - (snapshot.queued.num_requests - shortest) / spread if spread else 1.0
            return -(prefix_weight * cached + free_weight * free + queue_weight * short)

        return pair_of(request, candidates, least(snapshots, negated), decode_load)


class CacheAware:
    """SGLang's gateway: the shortest queue if loads are out of balance, else the longest prefix match above a share.

    Below that share the source picks the smallest cache tree, interpreted here as the shortest queue.
    """

    name = "sglang"

    def __init__(self, threshold: float = 0.5, absolute: float = 32, relative: float = 1.1) -> None:
        self._threshold, self._absolute, self._relative = threshold, absolute, relative

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        snapshots = in_time(request, candidates)
        loads = [snapshot.queued.num_requests for snapshot in snapshots]
        longest = least(snapshots, lambda snapshot: -num_cached_tokens(request, snapshot.worker))
        if longest is None:
            return None
        unbalanced = max(loads) - min(loads) > self._absolute and max(loads) > self._relative * min(loads)
        share = num_cached_tokens(request, longest.worker) / request.num_tokens
        if unbalanced or share <= self._threshold:
            longest = least(snapshots, lambda snapshot: snapshot.queued.num_requests)
        return pair_of(request, candidates, longest, decode_load)


def _incoming(request: RequestShape, snapshot: WorkerSnapshot) -> float:
    return request.num_tokens - num_cached_tokens(request, snapshot.worker)
