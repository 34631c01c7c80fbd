"""Settings of the scaling policy `SloPlanner`: objectives, bounds of the pools, and the degree of caution.

The planner process makes them from its flags, which are `planner_service.settings.PlannerSettings`.
"""

from dataclasses import dataclass, field

from tandem.core.errors import ConfigurationError
from tandem.planning.forecast import ForecastSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of the planner. Latencies in milliseconds, times in seconds.

    Args:
        ttft_ms, tpot_ms: the objectives, which `share` of the requests must meet.
        min_prefill, max_prefill, min_decode, max_decode: bounds of each pool's replicas; at least one, since an empty
            pool could not serve a first request in time.
        prefill_accelerators, decode_accelerators: accelerators of one replica.
        max_accelerators: limit of both pools together; None = no limit.
        variation: coefficient of variation of prompt lengths (standard deviation over mean), used until measured.
        max_use: maximum planned share of a pool's capacity (prefill time, decode KV and slots).
        comfort: a pool shrinks only if the remaining replicas stay below this share of every limit,
        hold_s: for at least this long, and for at least one and a half start-up times.
        drain_s: time in which a backlog is to be worked off.
        warmup_s: time after a replica became ready during which measurements are ignored.
        startup_s: start-up time of a replica, used until measured.
        interval_s: time between observations.
    """

    ttft_ms: float
    tpot_ms: float
    share: float = 0.95
    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    prefill_accelerators: int = 1
    decode_accelerators: int = 1
    max_accelerators: int | None = None
    variation: float = 1.0
    max_use: float = 0.85
    comfort: float = 0.95
    hold_s: float = 180.0
    drain_s: float = 30.0
    warmup_s: float = 30.0
    startup_s: float = 60.0
    interval_s: float = 10.0
    forecast: ForecastSettings = field(default_factory=ForecastSettings)

    def __post_init__(self) -> None:
        self._require(self.ttft_ms > 0 and self.tpot_ms > 0, "objectives above zero")
        self._require(0.5 <= self.share < 1, "share from 0.5 to below 1")
        for name in ("prefill", "decode"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            self._require(1 <= least <= most, f"1 <= min_{name} <= max_{name}")
            self._require(getattr(self, f"{name}_accelerators") >= 1, f"{name}_accelerators of 1 or more")
        self._require(0 < self.max_use < 1 and 0 < self.comfort <= 1, "max_use and comfort between 0 and 1")
        self._require(self.variation >= 0, "variation of 0 or more")
        self._require(min(self.hold_s, self.warmup_s, self.startup_s) >= 0, "times of 0 or more")
        self._require(min(self.drain_s, self.interval_s) > 0, "drain_s and interval_s above zero")
        least = self.accelerators(self.min_prefill, self.min_decode)
        self._require(
            self.max_accelerators is None or self.max_accelerators >= least,
            f"max_accelerators of at least {least}, which the smallest pools take",
        )

    def _require(self, holds: bool, needed: str) -> None:
        if not holds:
            raise ConfigurationError(f"{self} cannot be planned with; use {needed}")

    def accelerators(self, num_prefill: int, num_decode: int) -> int:
        """Number of accelerators used by pools of these sizes."""
        return num_prefill * self.prefill_accelerators + num_decode * self.decode_accelerators
