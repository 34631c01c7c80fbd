"""Text that a person reads after a test."""

import io
from collections.abc import Iterator

from rich.console import Console

from tandem.core.clock import ManualClock
from tandem.core.draft_counts import DraftCounts
from tandem.loadtest.client_cost import ClientCost
from tandem.loadtest.driver import OpenDriver
from tandem.loadtest.endpoint import GatewayEndpoint, ServerFacts
from tandem.loadtest.failure import UNFINISHED, Failure
from tandem.loadtest.load_test import Progress
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.pool_watch import PoolSample, PoolWatch
from tandem.loadtest.result import LoadResult
from tandem.loadtest.terminal import print_result, status_line
from tests.unit.loadtest.outcomes import REFUSED, outcome, result, unanswered
from tests.unit.loadtest.scripted_server import load_plan


def said(found: LoadResult) -> str:
    console = Console(file=io.StringIO(), width=120, soft_wrap=True)
    print_result(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_names_goodput_refusals_and_latencies() -> None:
    text = said(result(outcome(0.0), outcome(0.9), unanswered(0.5, REFUSED), outcome(0.0, ttft_s=0.96)))
    assert "4 requests in 1.0 s: 3 answered, 1 refused, 0 failed" in text
    assert "50.0% met TTFT ≤ 500.0 ms and TPOT ≤ 50.0 ms" in text
    assert "40% of them cached" in text
    assert "refused: 1 times http 429 capacity_exceeded: full" in text
    assert "TTFT from due time" in text
    assert "960.0 ms" in text
    assert "the client used 0.10 cores" in text
    assert "WARNING" not in text


def test_drafts_are_reported_where_there_were_some() -> None:
    pools = [
        PoolSample(n, "decode", 1, 1, 0, 0, 0.0, DraftCounts(100 * n, (30 * n, 20 * n), (25 * n, 15 * n), 1.25 * n))
        for n in (1, 3)
    ]
    text = said(result(outcome(0.0), pools=pools))
    assert "drafts: 80 of 100 accepted (80%), 1.40 tokens per decode step, 2.5 s of the workers' time saved" in text
    assert "accepted drafts by position: 1: 50 of 60, 2: 30 of 40" in text
    assert "drafts" not in said(result(outcome(0.0)))


def test_what_spoils_a_result_is_said() -> None:
    cut = unanswered(0.0, Failure(UNFINISHED, ""))
    cost = ClientCost(0.95, None, None, ("the client used 0.95 cores of the one it can use",))
    text = said(result(outcome(0.0), cut, client=cost, pools_problem="GET /admin/workers answers 404"))
    assert "WARNING: the client was a bottleneck, so latencies include waits of the client" in text
    assert "0.95 cores of the one it can use" in text
    assert "stopped early: 1 requests were cut" in text
    assert "GET /admin/workers answers 404" in text


def test_a_client_that_waited_for_its_machine_is_no_bottleneck() -> None:
    """Regression: THE CLIENT WAS A BOTTLENECK, beside 0.01 cores that it had used."""
    cost = ClientCost(0.01, None, None, ("its event loop was up to 31 ms late (99th percentile)",))
    text = said(result(outcome(0.0), client=cost))
    assert "the client's machine was busy" in text
    assert "bottleneck" not in text


class Unwalked(list[RequestOutcome]):
    """As long as a day's; may be cut, not walked."""

    def __len__(self) -> int:
        return 10**7

    def __iter__(self) -> Iterator[RequestOutcome]:
        raise AssertionError("a pass over all outcomes stops the event loop")


def test_progress_is_told_without_a_pass_over_all_outcomes() -> None:
    """Counting a million of them twice a second made requests late."""
    plan, clock = load_plan("http://host"), ManualClock(10.0)
    endpoint = GatewayEndpoint(plan, clock)
    endpoint.begin(0.0)
    driver = OpenDriver(plan, endpoint, ())
    driver.outcomes, driver.num_sent, driver.num_failed = Unwalked([outcome(9.0)] * 3000), 10**7 + 2, 4
    progress = Progress(driver, endpoint, PoolWatch(endpoint, 1.0), ServerFacts("scripted"))
    assert "10000002 sent, 0 open, 9999996 answered, 4 not · 1000 tokens/s" in status_line(plan, progress)


def test_an_empty_result_is_said() -> None:
    assert "no request was counted" in said(result())
