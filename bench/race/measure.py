"""One workload against one system that is up: warm-up, floor, the repeats, floor again.

Everything timed lies between the two floors. Raises whatever goes wrong; keeps nothing.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.floor import fastest_dtype, matmul_rate, read_bandwidth
from bench.load import ForeignLoad
from bench.race.client import Client
from bench.race.processes import ProcessTrees
from bench.race.system import Served, System
from bench.race.work import ModelCost, Rates
from bench.race.workloads import Figures, Played, Workload

_MB = 1e6
_OVERHEAD_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one workload in one round. `foreign_cores`: used by neither the system nor its client."""

    figures: Figures
    floors: Figures
    wall_s: float
    foreign_cores: float
    client_cores: float
    cached_share: float
    read_bandwidth: float
    matmul_rate: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits, seconds. `floor_repeats`: of each reading of the floor."""

    request_s: float = 900.0
    workload_s: float = 1200.0
    floor_repeats: int = 3


class Gauge:
    """Measures one shape, whose tokens cost `cost`; products are those of the dtype that PyTorch multiplies fastest."""

    def __init__(self, cost: ModelCost, limits: Limits | None = None) -> None:
        self._cost = cost
        self._limits = limits or Limits()
        self._dtype = fastest_dtype()

    def measure(self, system: System, served: Served, workload: Workload, seed: str) -> Measured:
        """Raises TimeoutError, WrongAnswerError or ExchangeError."""
        trees = ProcessTrees(served.pids)
        trees.prioritise()
        return asyncio.run(self._measure(system, served, workload, seed, trees))

    async def _measure(
        self, system: System, served: Served, workload: Workload, seed: str, trees: ProcessTrees
    ) -> Measured:
        async with asyncio.timeout(self._limits.workload_s):
            await self._warm_up(system, served, workload, seed)
            before = self._rates()
            trees.forget_peaks()
            client = Client(served, system.body, self._limits.request_s)
            try:
                foreign, cpu_s = ForeignLoad(), trees.cpu_s()
                plays = [await workload.play(client.ask, f"{seed}/{i}") for i in range(workload.repeats)]
                cpu_s, foreign_cores, client_cores = trees.cpu_s() - cpu_s, foreign.cores(), client.cores()
            finally:
                await client.close()
            peak_bytes = trees.peak_bytes()
        rates = _mean(before, self._rates())
        figures = _medians([workload.figures(played) for played in plays])
        figures |= {"CPU time": 1e3 * cpu_s / _num_tokens(plays), "peak memory": peak_bytes / _MB}
        return Measured(
            figures,
            self._floors(served, workload, rates) | budget(self._cost, served),
            sum(_wall_s(played) for played in plays),
            foreign_cores,
            client_cores,
            _cached_share(plays),
            rates.read_bandwidth,
            rates.matmul,
        )

    def _floors(self, served: Served, workload: Workload, rates: Rates) -> Figures:
        """Of coded weights only that of one stream: nobody's products of codes are the floor of all."""
        if served.weight_bytes is None:
            return floors(workload, self._cost, rates)
        return coded_floors(workload, self._cost, rates, served.weight_bytes)

    async def _warm_up(self, system: System, served: Served, workload: Workload, seed: str) -> None:
        """With prompts of its own, so that no cache knows those that count."""
        client = Client(served, system.body, self._limits.request_s)
        try:
            await workload.warm_up().play(client.ask, f"{seed}/warm-up")
        finally:
            await client.close()

    def _rates(self) -> Rates:
        repeats = self._limits.floor_repeats
        return Rates(read_bandwidth(repeats), matmul_rate(self._dtype, repeats)) if repeats else Rates(0.0, 0.0)


def floors(workload: Workload, cost: ModelCost, rates: Rates) -> Figures:
    """In the units of the figures; only where the bound is of that figure alone."""
    work = workload.work()
    if work is None or not rates.matmul:
        return {}
    num_output = sum(span.length + 1 for span in work.decodes)
    prefill_s = cost.prefill_floor_s(work, rates)
    if not work.num_steps:
        return {"prompt rate": sum(span.length for span in work.prefills) / prefill_s}
    found = {"output rate": num_output / cost.floor_s(work, rates)}
    if num_output == work.num_steps + 1:  # one stream alone
        found |= {"TTFT p50": 1e3 * prefill_s, "TPOT p50": 1e3 * cost.decode_floor_s(work, rates)}
    return found


def coded_floors(workload: Workload, cost: ModelCost, rates: Rates, weight_bytes: int) -> Figures:
    """One stream's, from the bytes of the file that holds the weights; every token reads them all."""
    work = workload.work()
    if work is None or not rates.matmul or "TPOT p50" not in floors(workload, cost, rates):
        return {}
    context_bytes = cost.read_bytes(work) / work.num_steps - cost.weight_bytes
    return {"TPOT p50": 1e3 * (weight_bytes + context_bytes) / rates.read_bandwidth}


def budget(cost: ModelCost, served: Served) -> Figures:
    """The memory that its processes together are meant to take at most; of a system whose KV cache is known."""
    if not served.kv_cache_bytes:
        return {}
    weight_bytes = cost.weight_bytes if served.weight_bytes is None else served.weight_bytes
    return {"peak memory": (weight_bytes + served.kv_cache_bytes + _OVERHEAD_BYTES) / _MB}


def _medians(each: Sequence[Figures]) -> Figures:
    """Of those that have the figure."""
    names = dict.fromkeys(name for figures in each for name in figures)
    return {name: statistics.median(figures[name] for figures in each if name in figures) for name in names}


def _mean(first: Rates, second: Rates) -> Rates:
    return Rates((first.read_bandwidth + second.read_bandwidth) / 2, (first.matmul + second.matmul) / 2)


def _num_tokens(plays: Sequence[Played]) -> int:
    """Those a workload is about: of answers, or of prompts where answers have one token."""
    answers = [answer for played in plays for answer in played.everything]
    is_prefill = all(answer.num_output == 1 for answer in answers)
    return sum(answer.num_prompt if is_prefill else answer.num_output for answer in answers)


def _wall_s(played: Played) -> float:
    ends = [answer.ended_s for answer in played.everything]
    return max(ends) - min(answer.sent_s for answer in played.everything)


def _cached_share(plays: Sequence[Played]) -> float:
    """Of prompt tokens, as the system tells it; 0 where it does not."""
    answers = [answer for played in plays for answer in played.everything]
    return sum(answer.num_cached for answer in answers) / sum(answer.num_prompt for answer in answers)
