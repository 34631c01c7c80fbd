"""Assumptions of a fleet simulation: speeds, memory, links, and pools at the start. Values only."""

from dataclasses import dataclass, field

from tandem.core.errors import ConfigurationError
from tandem.routing.admission import AdmissionLimits
from tandem.routing.snapshot import LinkState
from tandem.routing.speed import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSetting:
    """Settings of one run. Times in seconds.

    Args:
        prefill, decode: speed of one worker of each pool.
        prefill_kv_tokens, decode_kv_tokens: of one worker. Prefill workers cache prefixes in theirs.
        block_size, block_bytes: of KV; the trace's block ids name blocks of this size.
        chunk_tokens: of prefill; only the last chunk's hand-off outlasts it.
        max_running: requests in one decode batch.
        link: between any two workers.
        limits: the router's.
        num_prefill, num_decode: replicas that are ready at the start.
        startup_s: from asking for a replica to its being ready.
        interval_s: between a planner's observations. report_s: between a worker's reports to the router.
        prefill_accelerators, decode_accelerators: of one replica.
    """

    prefill: Speed
    decode: Speed
    prefill_kv_tokens: int
    decode_kv_tokens: int
    block_bytes: int
    block_size: int = 512
    chunk_tokens: int = 8192
    max_running: int = 256
    link: LinkState = field(default_factory=lambda: LinkState(25e9, 1.0))
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    num_prefill: int = 1
    num_decode: int = 1
    startup_s: float = 0.0
    interval_s: float = 10.0
    report_s: float = 0.5
    prefill_accelerators: int = 1
    decode_accelerators: int = 1

    def __post_init__(self) -> None:
        counts = (self.num_prefill, self.num_decode, self.block_size, self.max_running, self.chunk_tokens)
        if min(counts) < 1 or min(self.prefill_kv_tokens, self.decode_kv_tokens) < self.block_size:
            raise ConfigurationError(f"{self} has nothing to work with; use counts of 1 or more and a block of KV")
        if self.startup_s < 0 or min(self.interval_s, self.report_s) <= 0:
            raise ConfigurationError(f"{self}: use startup_s of 0 or more, interval_s and report_s above zero")
