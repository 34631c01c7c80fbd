"""Data that a pairing decision is based on: last reports of workers, measured links, and properties of the request.

Every time is read from the router's own clock, in seconds, so no two machines' clocks are ever compared.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from tandem.core.errors import InvalidRequestError, shown
from tandem.routing.speed import NO_WORK, PrefillWork

MAX_SOURCES = 256  # measured links kept into one worker


class Role(StrEnum):
    """Stages that a worker serves. A decode worker can always prefill a prompt itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


_LEAST = {
    "block_size": 1,
    "block_bytes": 1,
    "chunk_tokens": 1,
    "num_total_blocks": 1,
    "num_free_blocks": 0,
    "num_running": 0,
    "num_context_tokens": 0,
    "num_awaiting_kv": 0,
    "request_bytes": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker's last report.

    Args:
        kind: workers of one kind (accelerator, model, widths) share their calibrated speed.
        fingerprint: equal exactly when two workers may exchange blocks: model, KV layout, dtype, block size, versions.
        names_states: its reports to the locality index name the blocks after which a request can continue, since its
            model has recurrent or windowed layers; a prefix without one is of no use to it.
        block_bytes, request_bytes: what each block of tokens adds to a hand-off, and what is the same for every prompt.
        chunk_tokens: the most prompt tokens computed in one step; only the last chunk's transfer is exposed.
        num_free_blocks: free or evictable, and not promised to a request that waits.
        queued: prompt work accepted and not computed yet.
        num_running, num_context_tokens: requests accepted and not finished, and their tokens in context.
        num_awaiting_kv: of `num_running`, those whose prompt another worker computes: they do not decode yet.
        reported_at_s: when the report arrived here.
        figures_age_s: seconds between the request for the figures and `reported_at_s`. An engine answers between two
            steps, which can take long; the figures include the requests it was sent before they were asked for.
        taken_age_s: seconds between the engine's answer and `reported_at_s`: `queued` has been worked on since.
    """

    worker_id: str
    role: Role
    kind: str
    fingerprint: str
    block_size: int
    block_bytes: int
    chunk_tokens: int
    num_total_blocks: int
    num_free_blocks: int
    queued: PrefillWork = NO_WORK
    num_running: int = 0
    num_context_tokens: int = 0
    num_awaiting_kv: int = 0
    draining: bool = False
    reported_at_s: float = 0.0
    figures_age_s: float = 0.0
    taken_age_s: float = 0.0
    request_bytes: int = 0
    names_states: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            self._require(name, getattr(self, name) >= least, f"{least} or more")
        work = self.queued
        parts = (work.num_requests, work.num_tokens, work.num_pairs)
        self._require("queued", all(0 <= part < math.inf for part in parts), "finite parts of zero or more")
        self._require("reported_at_s", math.isfinite(self.reported_at_s), "a finite time")
        for name in ("figures_age_s", "taken_age_s"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "a finite time of zero or more")

    def _require(self, name: str, holds: bool, needed: str) -> None:
        if not holds:
            value = shown(getattr(self, name))
            raise InvalidRequestError(f"worker {shown(self.worker_id)} reports {name}={value}; it must report {needed}")


@dataclass(frozen=True, slots=True)
class LinkState:
    """Measured path between two workers. `latency_ms`: time of a transfer before its first byte."""

    bytes_per_s: float
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_ms >= 0):
            raise InvalidRequestError(f"link {self} cannot be used; bytes_per_s > 0 and latency_ms >= 0 are needed")

    def ms(self, num_bytes: float) -> float:
        return self.latency_ms + 1000.0 * num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Properties of a request that determine its placement.

    Args:
        pairing_id: names its pairing, unique among all gateways. A request that is paired again has the same one. "" =
            `request_id`, which clients choose.
        fingerprints: the pools that may serve it, among which cost chooses; None allows all.
        leading_blocks: number of leading blocks of the prompt that each worker holds, from the locality index.
        num_expected_output: expected number of output tokens.
        max_ttft_ms, max_tpot_ms: its objectives. The first is a limit of admission, the second a term of the decode
            cost.
        excluded: workers that have just failed it.
        decode_id: the decode worker already assigned; only a prefill worker is to be chosen.
        local_prefill: the decode worker must compute the prompt itself, whatever that costs.
        reserved: decode workers whose free memory others are to have first.
    """

    request_id: str
    num_tokens: int
    num_expected_output: int
    leading_blocks: Mapping[str, int] = field(default_factory=dict)
    fingerprints: frozenset[str] | None = None
    session_id: str | None = None
    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    excluded: frozenset[str] = frozenset()
    decode_id: str | None = None
    local_prefill: bool = False
    reserved: frozenset[str] = frozenset()
    pairing_id: str = ""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_expected_output"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name}={shown(getattr(self, name))} cannot be placed; use 1 or more")
        for name in ("max_ttft_ms", "max_tpot_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequestError(f"{name}={shown(value)} cannot be met; use a time above zero")

    @property
    def key(self) -> str:
        """Id of its pairing."""
        return self.pairing_id or self.request_id


_NO_LINKS: Mapping[str, LinkState] = MappingProxyType({})


class Links:
    """Measured links between ordered pairs of workers; an unmeasured pair has the `default` link.

    At most `MAX_SOURCES` links are kept per destination, to bound memory in a large fleet; the one known longest is
    dropped. A link that is `cut` has an infinite latency, so that every choice over it has an infinite cost.
    best_into: per destination with a measured link, a bound that no link into it beats; `default` for others. Bounds
    only improve: one that is too good makes a search slower, not wrong.
    """

    def __init__(self, default: LinkState, measured: Mapping[tuple[str, str], LinkState] | None = None) -> None:
        self.default = default
        self._into: dict[str, dict[str, LinkState]] = {}
        self._out_of: dict[str, dict[str, LinkState]] = {}
        self._improved: set[str] = set()
        self._cut: dict[str, frozenset[str]] = {}
        self.best_into: dict[str, LinkState] = {}
        for (source_id, destination_id), link in (measured or {}).items():
            self.update(source_id, destination_id, link)

    def between(self, source_id: str, destination_id: str) -> LinkState:
        return self.into(destination_id).get(source_id, self.default)

    def into(self, destination_id: str) -> Mapping[str, LinkState]:
        """The measured links into a worker, by source."""
        return self._into.get(destination_id, _NO_LINKS)

    def out_of(self, source_id: str) -> Mapping[str, LinkState]:
        """The measured links out of a worker, by destination."""
        return self._out_of.get(source_id, _NO_LINKS)

    def cut(self, source_ids: Iterable[str], destination_id: str) -> None:
        """Set the sources that cannot reach `destination_id`, replacing those set before."""
        cut = frozenset(source_ids)
        for source_id in self.cut_into(destination_id) - cut:
            self._into.get(destination_id, {}).pop(source_id, None)
            self._out_of.get(source_id, {}).pop(destination_id, None)
        for source_id in cut:
            self.update(source_id, destination_id, replace(self.default, latency_ms=math.inf))
        if cut:
            self._cut[destination_id] = cut
        else:
            self._cut.pop(destination_id, None)

    def cut_into(self, destination_id: str) -> frozenset[str]:
        """The sources that cannot reach a worker."""
        return self._cut.get(destination_id, frozenset())

    def update(self, source_id: str, destination_id: str, link: LinkState) -> None:
        """Store a measurement."""
        links = self._into.setdefault(destination_id, {})
        if links.get(source_id) == link:
            return
        links[source_id] = link
        self._out_of.setdefault(source_id, {})[destination_id] = link
        if len(links) > MAX_SOURCES:
            oldest_id = next(iter(links))
            del links[oldest_id], self._out_of[oldest_id][destination_id]
        known = self.best_into.get(destination_id, self.default)
        best = LinkState(max(known.bytes_per_s, link.bytes_per_s), min(known.latency_ms, link.latency_ms))
        self.best_into[destination_id] = best
        if best != known:
            self._improved.add(destination_id)

    def forget(self, worker_id: str) -> None:
        """Drop a worker's links."""
        for source_id in self._into.pop(worker_id, ()):
            del self._out_of[source_id][worker_id]
        for destination_id in self._out_of.pop(worker_id, ()):
            self._into.get(destination_id, {}).pop(worker_id, None)
        self.best_into.pop(worker_id, None)
        self._cut.pop(worker_id, None)

    def take_improved(self) -> Iterable[str]:
        """Returns the destinations whose best link has improved since the last call."""
        improved, self._improved = self._improved, set()
        return improved
