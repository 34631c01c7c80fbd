"""`tandem load`: a load test of any gateway over HTTP, with a report on latencies and attainment of objectives.

Owns the flags (each also a TANDEM_LOAD_* variable) and the exit code; `tandem.loadtest` does the work.
"""

import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from rich.console import Console

from tandem.core.clock import SystemClock
from tandem.core.errors import InvalidRequestError, without_password
from tandem.core.open_files import allow_sockets
from tandem.loadtest.environment import describe_environment, loop_factory
from tandem.loadtest.figures import can_draw, draw
from tandem.loadtest.load_test import run_load_test
from tandem.loadtest.plan import Arrivals, LoadPlan
from tandem.loadtest.result import LoadResult
from tandem.loadtest.result_file import check_writable, write_json
from tandem.loadtest.terminal import ProgressDisplay, print_result
from tandem.loadtest.text_lengths import parse_lengths
from tandem.process.settings import Settings
from tandem.workload.slo import Slo

INTERRUPTED = 130  # exit code of a test that was stopped early
STANDARD_OUTPUT = "-"  # value of --output
_LOG_COLUMNS = 120
_NO_MATPLOTLIB = "pictures need matplotlib, which is not here: pip install 'tandem[load]'; the JSON holds all figures"


class LoadCommand(Settings, cli_prog_name="tandem load", env_prefix="TANDEM_LOAD_"):
    """Send requests to a gateway and report the latencies that users would see.

    Closed loop: --concurrency clients, each of which sends its next request after an answer. Open loop: --rate requests
    a second, however slow the answers. Replay: --trace. Every flag is also a TANDEM_LOAD_* variable.
    """

    url: str = Field("http://127.0.0.1:8000", description="address of the gateway")
    admin_url: str | None = Field(
        None, description="address of the gateway's --admin-bind, which shows the worker pools; omitted: --url"
    )
    model: str | None = Field(None, description="model to request; omitted: the first one served")
    api_key: SecretStr | None = Field(
        None, description="API key, sent as `authorization: Bearer`, never written to files; omitted: none"
    )
    ready_timeout_s: float = Field(0.0, ge=0, description="wait this long for the gateway to be ready, seconds")

    concurrency: int = Field(8, ge=1, le=20000, description="closed loop: number of clients")
    think_time_s: float = Field(0.0, ge=0, description="mean pause of a client before its next request, seconds")
    honour_retry_after: bool = Field(
        False, description="closed loop: a refused client waits as long as Retry-After says"
    )
    rate: float | None = Field(
        None, gt=0, le=1e5, description="open loop: requests (or conversations) a second; omitted: closed loop"
    )
    arrivals: Literal["poisson", "bursty", "evenly"] = Field(
        "poisson", description="open loop: distribution of arrivals"
    )
    burstiness: float = Field(
        3.0, gt=0, le=20, description="bursty: standard deviation of the gaps over their mean; 1 is poisson"
    )
    trace: Path | None = Field(None, description="trace to replay: Mooncake .jsonl or Azure .csv; omitted: no replay")
    time_scale: float = Field(1.0, gt=0, description="replay: factor for arrival times; 0.5 = twice as fast")
    length_scale: float = Field(1.0, gt=0, le=64, description="replay: factor for token counts and block sizes")

    prompt_tokens: str = Field("256", description="new tokens of a prompt: N, LEAST-MOST or lognormal:MEDIAN,P90,MOST")
    output_tokens: str = Field("64", description="tokens of an answer, in the same format")
    shared_prefix_share: float = Field(0.0, ge=0, le=1, description="share of a first prompt that is a shared prefix")
    num_prefixes: int = Field(1, ge=1, le=1000000, description="number of different shared prefixes")
    turns: str = Field(
        "1", description="requests of a conversation, each with its whole history; in the format of lengths"
    )
    token_ids: str = Field(
        "1000-3999", description="range of the token ids in prompts, FIRST-LAST; of words, not special tokens"
    )
    ignore_eos: bool = Field(True, description="answers have exactly the requested length")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy")

    duration_s: float | None = Field(None, gt=0, description="duration of sending requests, seconds; omitted: 30")
    requests: int | None = Field(
        None, ge=1, description="number of requests, without warm-up; omitted: limited by time"
    )
    warm_up_s: float = Field(0.0, ge=0, description="duration of a warm-up, whose requests are not counted, seconds")
    request_timeout_s: float = Field(300.0, gt=0, description="maximum duration of a request, seconds")
    max_open: int = Field(
        8192, ge=1, le=60000, description="maximum requests open at once; more count as failures of the client"
    )
    seed: int = Field(0, description="seed of arrivals, lengths and prompts")

    ttft_ms: float = Field(1000.0, gt=0, description="objective: time to the first token, milliseconds")
    tpot_ms: float = Field(50.0, gt=0, description="objective: mean time of each further token, milliseconds")
    fail_below_attainment: float | None = Field(
        None, ge=0, le=1, description="exit code 1 when a smaller share of requests met both objectives; omitted: never"
    )

    output: str | None = Field(
        None, description="write the result as JSON to this file; -: one line to standard output; omitted: not written"
    )
    figures: Path | None = Field(None, description="directory for figures; needs matplotlib; omitted: none are drawn")
    figure_format: Literal["svg", "png"] = Field("svg", description="format of the figures")
    window_s: float = Field(1.0, gt=0, description="interval of time series, seconds")
    poll_s: float = Field(1.0, ge=0, description="interval of sampling the worker pools, seconds; 0 = never")
    progress_s: float = Field(10.0, gt=0, description="without a terminal: interval of progress lines, seconds")
    quiet: bool = Field(False, description="print only the report")

    @field_validator("prompt_tokens", "output_tokens", "turns")
    @classmethod
    def _check_lengths(cls, value: str) -> str:
        parse_lengths(value)
        return value

    @field_validator("token_ids")
    @classmethod
    def _check_token_ids(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if not (first.isdecimal() and last.isdecimal() and int(first) < int(last) < 1 << 24):
            raise ValueError("two token ids are needed, the lower first, as 1000-3999")
        return value

    @model_validator(mode="after")
    def _check_mode(self) -> "LoadCommand":
        if self.rate is not None and self.trace is not None:
            raise ValueError("--rate and --trace are two loads; a trace has its own arrivals (see --time-scale)")
        if self.honour_retry_after and (self.rate is not None or self.trace is not None):
            raise ValueError("--honour-retry-after is for the closed loop; an open one does not wait for anybody")
        return self

    def run(self) -> int:
        """Run the test; the exit code is 1 when nothing was answered, or when attainment is below what was asked.

        Raises:
            InvalidRequestError: a line of the trace cannot be read; what ran before it was reported and kept.
        """
        console = Console(
            stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else _LOG_COLUMNS
        )
        plan = self.plan()
        self._prepare(console)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            result = runner.run(self._test(plan, console))
        print_result(result, console)
        self._keep(result, console)
        return self._exit_code(result, console)

    def plan(self) -> LoadPlan:
        """The plan of the load test that these settings describe."""
        first, _, last = self.token_ids.partition("-")
        ends_by_itself = self.trace is not None or self.requests is not None
        return LoadPlan(
            url=self.url,
            admin_url=self.admin_url or self.url,
            model=self.model,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            ready_timeout_s=self.ready_timeout_s,
            arrivals=self._arrivals(),
            prompt_lengths=parse_lengths(self.prompt_tokens),
            output_lengths=parse_lengths(self.output_tokens),
            turns=parse_lengths(self.turns),
            shared_prefix_share=self.shared_prefix_share,
            num_prefixes=self.num_prefixes,
            token_ids=(int(first), int(last)),
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            duration_s=self.duration_s if self.duration_s is not None or ends_by_itself else 30.0,
            num_requests=self.requests,
            warm_up_s=self.warm_up_s,
            request_timeout_s=self.request_timeout_s,
            max_open=self.max_open,
            seed=self.seed,
            slo=Slo(self.ttft_ms / 1000, self.tpot_ms / 1000),
            window_s=self.window_s,
            poll_s=self.poll_s,
        )

    def _arrivals(self) -> Arrivals:
        return Arrivals(
            concurrency=self.concurrency,
            think_time_s=self.think_time_s,
            honour_retry_after=self.honour_retry_after,
            rate_per_s=self.rate,
            process=self.arrivals,
            burstiness=self.burstiness,
            trace=self.trace,
            time_scale=self.time_scale,
            length_scale=self.length_scale,
        )

    def _prepare(self, console: Console) -> None:
        """Checks before the test that its results can be written and drawn afterwards."""
        allow_sockets(self.max_open)
        if self.output is not None and self.output != STANDARD_OUTPUT:
            check_writable(Path(self.output))
        if self.figures is not None:
            check_writable(self.figures / f"latency.{self.figure_format}")
            if not can_draw():
                console.print(_NO_MATPLOTLIB, markup=False)

    async def _test(self, plan: LoadPlan, console: Console) -> LoadResult:
        display = ProgressDisplay(plan, console, self.progress_s, is_quiet=self.quiet)
        context = {
            "command": command_line(sys.argv[1:]),
            "settings": self._settings(),
            "environment": describe_environment(),
        }
        with _signals() as stop:
            if self.ready_timeout_s and not self.quiet:
                console.print(
                    f"waiting for {without_password(self.url)} for up to {self.ready_timeout_s:g} s", markup=False
                )
            return await run_load_test(plan, SystemClock(), stop, context, display.watch)

    def _keep(self, result: LoadResult, console: Console) -> None:
        """Writes the results, the JSON first, so that a failing picture loses nothing."""
        value = result.as_json()
        if self.output is not None:
            write_json(value, None if self.output == STANDARD_OUTPUT else Path(self.output))
        if self.figures is None:
            return
        if not can_draw():
            console.print(_NO_MATPLOTLIB, markup=False)
            return
        for path in draw(value, self.figures, self.figure_format):
            console.print(f"drawn: {path}", markup=False)

    def _exit_code(self, result: LoadResult, console: Console) -> int:
        if result.trace_problem is not None:
            raise InvalidRequestError(result.trace_problem)
        if result.was_stopped:
            return INTERRUPTED
        if result.report is None or not result.report.num_completed:
            console.print("error: no counted request was answered", markup=False)
            return 1
        if self.fail_below_attainment is not None and result.attainment < self.fail_below_attainment:
            console.print(
                f"error: attainment {result.attainment:.4f} is below {self.fail_below_attainment}", markup=False
            )
            return 1
        return 0

    def _settings(self) -> dict[str, object]:
        """Returns the settings for the result, without secrets."""
        shown = self.model_dump(mode="json", exclude={"api_key"})
        return {name: value for name, value in shown.items() if value is not None}


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Yields an event that Ctrl-C or SIGTERM sets; a second Ctrl-C ends the process as usual."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        stop.set()
        remove()

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        remove()


def command_line(arguments: Sequence[str]) -> str:
    """The command line as typed, without the API key."""
    words = ["tandem", *arguments]
    for index, word in enumerate(words):
        if word.startswith("--api-key"):
            name, equals, _ = word.partition("=")
            words[index] = f"{name}=***" if equals else name
            if not equals and index + 1 < len(words):
                words[index + 1] = "***"
    return shlex.join(words)
