"""Shows a load test's progress and its result on a terminal. Decides nothing, writes only to its console."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.loadtest.load_test import Progress
from tandem.loadtest.plan import LoadPlan
from tandem.loadtest.result import LoadResult
from tandem.workload.slo import Percentiles, percentiles

_REFRESH_S = 0.5
_RECENT_S = 10.0
_MEASURES = {
    "ttft_s": "TTFT from due time",
    "ttft_from_send_s": "TTFT from sending",
    "tpot_s": "TPOT",
    "gap_s": "gap between events",
    "e2e_s": "whole answer",
}


class ProgressDisplay:
    """Shows the progress of a test: a line that is updated on a terminal, else a new line at intervals."""

    def __init__(self, plan: LoadPlan, console: Console, interval_s: float, *, is_quiet: bool) -> None:
        self._plan = plan
        self._console = console
        self._interval_s = interval_s
        self._is_quiet = is_quiet

    @contextlib.asynccontextmanager
    async def watch(self, progress: Progress) -> AsyncIterator[None]:
        """Shows progress during the block."""
        if self._is_quiet:
            yield
            return
        self._console.print(_headline(self._plan, progress), markup=False)
        telling = asyncio.create_task(self._tell(progress), name="progress")
        try:
            yield
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def _tell(self, progress: Progress) -> None:
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(self._interval_s)
                self._console.print(status_line(self._plan, progress), markup=False)
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            while True:
                live.update(Text(status_line(self._plan, progress)), refresh=True)
                await asyncio.sleep(_REFRESH_S)


def status_line(plan: LoadPlan, progress: Progress) -> str:
    """Current progress; latencies are of the last ten seconds."""
    driver, now_s = progress.driver, progress.endpoint.now_s()
    outcomes = driver.outcomes
    recent = [one for one in outcomes[-2000:] if one.ended_s > now_s - _RECENT_S and one.failure is None]
    ttft = percentiles([one.ttft_s for one in (each.served() for each in recent) if one.ttft_s is not None])
    rate = sum(one.num_output_tokens for one in recent) / min(_RECENT_S, max(1.0, now_s + plan.warm_up_s))
    where = f"warm-up {-now_s:.0f} s" if now_s < 0 else f"{now_s:.0f} s"
    parts = [
        f"{where}{'' if plan.duration_s is None else f' of {plan.duration_s:g} s'}",
        f"{driver.num_sent} sent, {driver.num_open} open, {len(outcomes) - driver.num_failed} answered, "
        f"{driver.num_failed} not",
        f"{rate:.0f} tokens/s",
    ]
    return " · ".join([*parts, f"TTFT p50 {_ms(ttft.p50)}, p99 {_ms(ttft.p99)}"] if ttft else parts)


def print_result(result: LoadResult, console: Console) -> None:
    """Prints the table of results, failures and warnings."""
    for line in _summary(result):
        console.print(line, markup=False)
    table = Table("", "requests", "mean", "p50", "p90", "p99", "max")
    for name, title in _MEASURES.items():
        found = result.latencies.get(name)
        if found is not None:
            table.add_row(title, str(found.num_samples), *_row(found))
    if table.row_count:
        console.print(table)
    for failure in result.failures:
        example = failure.examples[0] if failure.examples else ""
        word = "refused" if failure.is_refusal else "failed"
        console.print(f"{word}: {failure.count} times {failure.kind}: {example}", markup=False)
    for line in _warnings(result):
        console.print(line, markup=False)


def _summary(result: LoadResult) -> Iterator[str]:
    report, sent = result.report, result.report_from_send
    if report is None or sent is None:
        yield "no request was counted"
        return
    yield (
        f"{report.num_requests} requests in {report.duration_s:.1f} s: {report.num_completed} answered, "
        f"{report.num_rejected} refused, {report.num_failed} failed"
    )
    yield (
        f"{report.num_completed / report.duration_s:.2f} requests/s · "
        f"{report.num_output_tokens / report.duration_s:.1f} output tokens/s · "
        f"{result.num_prompt_tokens / report.duration_s:.1f} prompt tokens/s, "
        f"{result.num_cached_tokens / max(1, result.num_prompt_tokens):.0%} of them cached"
    )
    yield (
        f"goodput {report.goodput_per_s:.2f} requests/s: {report.attainment:.1%} met TTFT ≤ {_ms(result.slo.ttft_s)} "
        f"and TPOT ≤ {_ms(result.slo.tpot_s)} ({sent.attainment:.1%} counted from sending)"
    )
    drafts = result.drafts
    if drafts is not None:
        yield (
            f"drafts: {drafts.num_accepted} of {drafts.num_drafted} accepted "
            f"({drafts.num_accepted / drafts.num_drafted:.0%}), {drafts.tokens_per_step:.2f} tokens per decode step, "
            f"{drafts.saved_s or 0.0:.1f} s of the workers' time saved"
        )
        yield f"accepted drafts by position: {drafts.by_position}"


def _warnings(result: LoadResult) -> Iterator[str]:
    if result.num_unfinished:
        yield f"stopped early: {result.num_unfinished} requests were cut and are not counted"
    if result.pools_problem is not None:
        yield f"worker pools could not always be seen: {result.pools_problem}"
    yield f"the client used {result.client.cpu_cores:.2f} cores"
    if result.client.is_saturated:
        what = "the client was a bottleneck" if result.client.is_busy else "the client's machine was busy"
        yield f"WARNING: {what}, so latencies include waits of the client: {'; '.join(result.client.reasons)}"


def _headline(plan: LoadPlan, progress: Progress) -> str:
    arrivals = plan.arrivals
    loads = {
        "closed": f"{arrivals.concurrency} clients",
        "open": f"{arrivals.rate_per_s} requests/s, {arrivals.process}",
        "trace": f"{arrivals.trace}, its times multiplied by {arrivals.time_scale:g}",
    }
    version = "" if progress.server.version is None else f" (tandem {progress.server.version})"
    return f"{plan.url}{version}, {progress.server.model}: {loads[arrivals.mode]}"


def _row(found: Percentiles) -> tuple[str, ...]:
    return tuple(map(_ms, (found.mean, found.p50, found.p90, found.p99, found.maximum)))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
