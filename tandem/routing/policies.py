"""Interface of routing policies and its implementations: predicted cost, and simpler policies for comparison.

All candidates a policy sees are usable: none is dead, draining or incompatible. It returns None if none meets the
limits; `pairing` then tries `search` before it refuses. Ties go to the worker chosen longest ago, so no policy
prefers a worker for ever.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tandem.core.errors import ConfigurationError, shown
from tandem.routing.candidates import Candidates, Placement, WorkerSnapshot, num_cached_tokens
from tandem.routing.search import DEFAULT_FETCH_SOURCES, cheapest
from tandem.routing.snapshot import RequestShape

MAX_SESSIONS = 65_536  # that are remembered


class RoutingPolicy(Protocol):
    """Chooses the workers that serve a request among the candidates."""

    @property
    def name(self) -> str: ...

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        """Returns a choice, or None if none meets the limits. Called once per request and pool, by one thread; may keep
        state of bounded size.
        """
        ...


class PredictedCost:
    """Least predicted milliseconds, remote prefixes included when `num_fetch_sources` is above zero."""

    name = "predicted cost"

    def __init__(self, num_fetch_sources: int = DEFAULT_FETCH_SOURCES) -> None:
        self._num_fetch_sources = num_fetch_sources

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        return cheapest(request, candidates, self._num_fetch_sources)


class RoundRobin:
    """The worker chosen longest ago."""

    name = "round robin"

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        return _by_score(request, candidates, lambda snapshot: 0.0, lambda snapshot: 0.0)


class Random:
    """Any worker, at random."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        return _by_score(
            request, candidates, lambda snapshot: self._random.random(), lambda snapshot: self._random.random()
        )


class LeastLoaded:
    """The fewest prompt tokens queued, then the fewest requests decoding."""

    name = "least loaded"

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        return _by_score(request, candidates, prefill_load, decode_load)


class PrefixOnly:
    """The longest cached prefix. Requests that share a first block all go to few workers; for comparison only."""

    name = "prefix only"

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        def longest(snapshot: WorkerSnapshot) -> float:
            return -num_cached_tokens(request, snapshot.worker)

        return _by_score(request, candidates, longest, longest)


class SessionSticky:
    """Keeps a session on its workers while they are candidates; other requests go to the least loaded."""

    name = "session sticky"

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def choose(self, request: RequestShape, candidates: Candidates) -> Placement | None:
        prefill_id, decode_id = self._homes.get(request.session_id or "", ("", ""))
        choice = _by_score(
            request,
            candidates,
            lambda snapshot: float("-inf") if snapshot.worker_id == prefill_id else prefill_load(snapshot),
            lambda snapshot: float("-inf") if snapshot.worker_id == decode_id else decode_load(snapshot),
        )
        if choice is not None and request.session_id:
            self._remember(request.session_id, choice, prefill_id)
        return choice

    def __len__(self) -> int:
        """Number of sessions remembered."""
        return len(self._homes)

    def _remember(self, session_id: str, choice: Placement, former_prefill_id: str) -> None:
        prefill_id = choice.prefill.worker_id if choice.prefill is not None else former_prefill_id
        self._homes[session_id] = (prefill_id, choice.decode.worker_id)
        self._homes.move_to_end(session_id)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "predicted-cost": PredictedCost,
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "prefix-only": PrefixOnly,
    "session-sticky": SessionSticky,
}


def policy_named(name: str) -> RoutingPolicy:
    """Creates the policy that has this name in settings.

    Raises:
        ConfigurationError: the name is unknown.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise ConfigurationError(f"routing policy {shown(name)} is unknown; use one of {', '.join(POLICIES)}") from None


def in_time(request: RequestShape, candidates: Candidates) -> Sequence[WorkerSnapshot]:
    """Returns the prefill workers with a predicted TTFT within the limit; decode workers if no other can prefill."""
    computing = candidates.prefill or candidates.decode
    if candidates.max_ttft_ms == float("inf"):
        return computing
    return [
        snapshot
        for snapshot in computing
        if snapshot.wait_ms(candidates.now_s)
        + snapshot.speed.prefill.prompt_ms(request.num_tokens, num_cached_tokens(request, snapshot.worker))
        <= candidates.max_ttft_ms
    ]


def least(snapshots: Iterable[WorkerSnapshot], score: Callable[[WorkerSnapshot], float]) -> WorkerSnapshot | None:
    """Returns the worker with the lowest score; ties go to the one chosen longest ago."""
    return min(snapshots, key=lambda snapshot: (score(snapshot), snapshot.turn), default=None)


def prefill_load(snapshot: WorkerSnapshot) -> float:
    """Number of prompt tokens that are queued."""
    return snapshot.queued.num_tokens


def decode_load(snapshot: WorkerSnapshot) -> float:
    """Number of running requests."""
    return snapshot.num_running


def pair_of(
    request: RequestShape,
    candidates: Candidates,
    prefill: WorkerSnapshot | None,
    score: Callable[[WorkerSnapshot], float],
) -> Placement | None:
    """Returns `prefill` with the other worker of lowest decode score; that worker alone if no other prefills."""
    if not candidates.prefill:
        alone = least(in_time(request, candidates), score)
        return None if alone is None else Placement(None, alone)
    if prefill is None:
        return None
    others = (s for s in candidates.decode if s.worker_id != prefill.worker_id)
    decode = least(others, score)
    return None if decode is None else Placement(prefill, decode)


def _by_score(
    request: RequestShape,
    candidates: Candidates,
    prefill_score: Callable[[WorkerSnapshot], float],
    decode_score: Callable[[WorkerSnapshot], float],
) -> Placement | None:
    prefill = least(in_time(request, candidates), prefill_score)
    return pair_of(request, candidates, prefill, decode_score)
