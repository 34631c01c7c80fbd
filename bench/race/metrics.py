"""The words of the race's table: what is measured, in which unit, and which way is better."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of figures. `is_rate`: more is better."""

    name: str
    unit: str
    is_rate: bool = False

    def better_by(self, ours: float, theirs: float) -> float:
        """Factor by which ours is better: above 1 we are ahead."""
        return ours / theirs if self.is_rate else theirs / ours


METRICS = {
    metric.name: metric
    for metric in (
        Metric("TTFT p50", "ms"),
        Metric("TPOT p50", "ms"),
        Metric("ITL p50", "ms"),
        Metric("ITL p99", "ms"),
        Metric("output rate", "tok/s", is_rate=True),
        Metric("prompt rate", "tok/s", is_rate=True),
        Metric("CPU time", "ms/tok"),
        Metric("peak memory", "MB"),
    )
}

# Of each workload the figure that it is about.
HEADLINES = {
    "single": "TPOT p50",
    "prefill-1": "prompt rate",
    "prefill-8": "prompt rate",
    "batch": "output rate",
    "shared": "output rate",
    "burst": "ITL p99",
    "turns": "output rate",
}
