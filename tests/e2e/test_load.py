"""`tandem load` as a user runs it: a process against a real cluster, and against gateways whose backends misbehave."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.load import LoadCommand, command_line
from tandem.cli.main import main
from tandem.core.errors import CapacityError, ConfigurationError, UnavailableError
from tandem.loadtest.plan import LoadPlan
from tests.helpers import command_line as commands
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.command_line import environment
from tests.helpers.fake_backend import FakeCluster, eventually
from tests.helpers.fake_backend import running_cluster as fake_cluster
from tests.helpers.serving_clients import is_idle
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

PATIENT = ("--ready-timeout-s", "60")  # NOTE: on a crowded machine a router may lose sight of workers for a moment
SMALL = (*PATIENT, "--token-ids", "10-200", "--prompt-tokens", "20-60", "--output-tokens", "5-9", "--poll-s", "0.1")
QUICK = (*SMALL, "--requests", "12", "--concurrency", "3")


@dataclass(frozen=True)
class Ran:
    """A `tandem load` that has ended; `result`: what it wrote to standard output."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value

    def counts(self) -> tuple[int, int, int]:
        """Completed, refused, failed."""
        report = self.result["report"]
        return report["num_completed"], report["num_rejected"], report["num_failed"]


def command(*flags: str | Path) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.main", "load", "--output", "-", *map(str, flags)]


def load(*flags: str | Path, **variables: str) -> Ran:
    done = commands.run("load", "--output", "-", *flags, env=environment(**variables))
    return Ran(done.returncode, done.stdout, done.stderr)


async def started(*flags: str | Path) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command(*flags), stdout=pipe, stderr=pipe, env=environment())


async def ended(process: asyncio.subprocess.Process) -> Ran:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def load_of(cluster: FakeCluster, *flags: str) -> Ran:
    return await ended(await started("--url", cluster.url, *flags))


def kinds(ran: Ran) -> dict[str, int]:
    return {failure["kind"]: failure["count"] for failure in ran.result["failures"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))
    flags = ("--kv-cache-gib", "0.02", "--no-native-kernels")
    with running_cluster(model, decode=2, extra={"worker": flags}) as running:
        yield running


def test_a_closed_loop_on_a_real_cluster(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.metrics("gateway")
    ran = load("--url", cluster.url, *QUICK, "--turns", "2", "--shared-prefix-share", "0.8", "--figures", tmp_path)
    assert ran.code == 0, ran.err
    assert ran.counts() == (12, 0, 0)
    after = cluster.metrics("gateway")
    for name, key in (("generation", "num_output_tokens"), ("prompt", "num_prompt_tokens")):
        ((label, total),) = after[f"vllm:{name}_tokens_total"].items()
        served = total - before.get(f"vllm:{name}_tokens_total", {}).get(label, 0)
        result = ran.result if name == "prompt" else ran.result["report"]
        assert result[key] == served, "the client and the gateway count the same tokens"
    assert ran.result["num_cached_tokens"] > 0
    assert ran.result["server"]["model"] == cluster.model
    assert {sample["role"]: sample["num_ready"] for sample in ran.result["pools"]} == {"prefill": 1, "decode": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latency.svg", "over-time.svg", "throughput.svg"]
    assert "goodput" in ran.err
    cluster.wait(lambda: is_idle(cluster))


def test_an_open_loop_on_a_real_cluster(cluster: Cluster) -> None:
    flags = ("--rate", "30", "--arrivals", "bursty", "--duration-s", "1", "--warm-up-s", "0.3", "--window-s", "0.25")
    ran = load("--url", cluster.url, *SMALL, *flags)
    assert ran.code == 0, ran.err
    num_completed, num_refused, num_failed = ran.counts()
    assert (num_refused, num_failed) == (0, 0)
    assert num_completed == ran.result["latencies"]["ttft_s"]["num_samples"] > 5
    assert ran.result["num_warm_up"] > 0
    due = sum(window["num_due"] for window in ran.result["windows"])
    assert due == num_completed
    sent = ran.result["latencies"]["ttft_from_send_s"]
    assert 0 < sent["p50"] <= ran.result["latencies"]["ttft_s"]["p50"] + 1e-6


def test_a_trace_on_a_real_cluster_hits_the_cache_where_blocks_are_equal(cluster: Cluster, tmp_path: Path) -> None:
    shape = {"timestamp": 0, "input_length": 2048, "output_length": 160}
    lines = [{**shape, "hash_ids": [100, 101, 102, 200 + number]} for number in range(10)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scale = ("--length-scale", "0.03125", "--time-scale", "0.5")
    ran = load("--url", cluster.url, *PATIENT, "--token-ids", "10-200", "--trace", tmp_path / "t.jsonl", *scale)
    assert ran.code == 0, ran.err
    assert ran.counts() == (10, 0, 0)
    assert ran.result["num_prompt_tokens"] == 10 * 64
    assert ran.result["report"]["num_output_tokens"] == 10 * 5
    assert ran.result["num_cached_tokens"] % 16 == 0
    assert ran.result["num_cached_tokens"] > 3 * 48


def test_exit_codes_for_ci(cluster: Cluster) -> None:
    flags = ("--url", cluster.url, *QUICK)
    assert load(*flags, "--ttft-ms", "60000", "--tpot-ms", "60000", "--fail-below-attainment", "1").code == 0
    missed = load(*flags, "--ttft-ms", "0.001", "--fail-below-attainment", "0.5")
    assert missed.code == 1
    assert "error: attainment 0.0000 is below 0.5" in missed.err
    assert missed.counts() == (12, 0, 0), "the result is kept all the same"
    assert load(*flags, "--ttft-ms", "0.001").code == 0


def test_variables_are_flags(cluster: Cluster) -> None:
    variables = {
        "TANDEM_LOAD_URL": cluster.url,
        "TANDEM_LOAD_REQUESTS": "2",
        "TANDEM_LOAD_PROMPT_TOKENS": "7",
        "TANDEM_LOAD_OUTPUT_TOKENS": "3",
        "TANDEM_LOAD_TOKEN_IDS": "10-200",
        "TANDEM_LOAD_API_KEY": "s3cret",
        "TANDEM_LOAD_QUIET": "true",
        "TANDEM_LOAD_READY_TIMEOUT_S": "60",
        "TANDEM_URL": "http://other:1",
    }
    ran = load(**variables)
    assert ran.code == 0, ran.err
    assert (ran.result["num_prompt_tokens"], ran.result["report"]["num_output_tokens"]) == (14, 6)
    assert "s3cret" not in ran.out + ran.err
    assert "tandem load" in ran.result["command"]


def test_a_key_is_not_in_the_result(cluster: Cluster) -> None:
    ran = load("--url", cluster.url, *QUICK, "--api-key", "s3cret")
    assert ran.code == 0, ran.err
    assert "s3cret" not in ran.out + ran.err
    assert "--api-key '***'" in ran.result["command"]


def test_without_matplotlib_the_json_remains(cluster: Cluster, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from tandem.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = [
        "load",
        "--url",
        cluster.url,
        *QUICK,
        "--figures",
        str(tmp_path / "f"),
        "--output",
        str(tmp_path / "r.json"),
    ]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "pip install 'tandem[load]'" in done.stderr
    assert list((tmp_path / "f").iterdir()) == []
    assert json.loads((tmp_path / "r.json").read_text())["report"]["num_completed"] == 12


def test_refusals_of_a_full_gateway_are_counted_and_cost_goodput(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path, max_concurrent_requests=1) as cluster:
            cluster.workers[0].hold_at = 2
            process = await started("--url", cluster.url, *SMALL, "--concurrency", "4", "--requests", "8")
            await asyncio.wait_for(cluster.workers[0].reached.wait(), 30)
            await eventually(lambda: _num_refused(cluster) >= 3)
            cluster.workers[0].go.set()
            ran = await ended(process)
        assert ran.code == 0, ran.err
        completed, refused, failed = ran.counts()
        assert completed + refused == 8
        assert refused >= 3
        assert failed == 0
        assert kinds(ran) == {"http 429 capacity_exceeded": refused}
        assert ran.result["report"]["attainment"] <= completed / 8

    asyncio.run(run())


def test_a_router_that_refuses_is_a_refusal_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path) as cluster:
            cluster.routers[0].refuse = CapacityError("every worker is busy", 3.0)
            ran = await load_of(cluster, *QUICK)
        assert ran.code == 1
        assert "no counted request was answered" in ran.err
        assert ran.counts() == (0, 12, 0)
        assert kinds(ran) == {"http 429 capacity_exceeded": 12}

    asyncio.run(run())


def test_an_error_in_mid_stream_is_a_failure(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path, failover_timeout_s=0.0) as cluster:
            for worker in cluster.workers:
                worker.fail_at = 3
            ran = await load_of(cluster, *QUICK)
        assert ran.counts() == (0, 0, 12)
        assert kinds(ran) == {"stream unavailable": 12}
        assert sum(window["output_tokens_per_s"] for window in ran.result["windows"]) > 0

    asyncio.run(run())


def test_a_failover_that_the_gateway_hides_is_no_failure(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path) as cluster:
            cluster.workers[0].fail_at = 3
            cluster.workers[0].failure = UnavailableError("going")
            ran = await load_of(cluster, *QUICK)
        assert ran.counts() == (12, 0, 0)

    asyncio.run(run())


def test_a_gateway_that_goes_away_in_the_middle(cluster: Cluster) -> None:
    """NOTE: it is started again at the same address before the test that follows."""

    def num_served() -> float:
        return sum(cluster.metrics("gateway")["vllm:generation_tokens_total"].values())

    async def run() -> Ran:
        before = num_served()
        process = await started("--url", cluster.url, *SMALL, "--duration-s", "3", "--rate", "20")
        await asyncio.to_thread(cluster.wait, lambda: num_served() > before + 20, 30.0)
        cluster.processes["gateway"].kill()
        return await ended(process)

    try:
        ran = asyncio.run(run())
    finally:
        cluster.processes["gateway"].restart()
    completed, refused, failed = ran.counts()
    assert refused == 0
    assert completed > 1
    assert failed > 5
    assert set(kinds(ran)) <= {"cannot connect", "connection cut"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_a_report_of_what_ran(tmp_path: Path, number: signal.Signals) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path) as cluster:
            process = await started("--url", cluster.url, *SMALL, "--concurrency", "2", "--duration-s", "300")
            await eventually(lambda: len(cluster.workers[0].calls) > 4, timeout_s=30)
            cluster.workers[0].hold_at = 2
            await asyncio.wait_for(cluster.workers[0].reached.wait(), 10)
            process.send_signal(number)
            ran = await ended(process)
            await eventually(lambda: cluster.workers[0].num_open == 0)
        assert ran.code == 130
        assert ran.result["was_stopped"] is True
        assert ran.result["num_unfinished"] >= 1
        completed, refused, failed = ran.counts()
        assert completed >= 3
        assert (refused, failed) == (0, 0)
        assert "stopped early" in ran.err
        assert "Traceback" not in ran.err

    asyncio.run(run())


def test_ctrl_c_while_it_waits_for_a_gateway() -> None:
    async def run() -> None:
        process = await started("--url", "http://127.0.0.1:1", "--ready-timeout-s", "300")
        assert process.stderr is not None
        assert b"waiting for http://127.0.0.1:1" in await asyncio.wait_for(process.stderr.readline(), 30)
        process.send_signal(signal.SIGINT)
        ran = await ended(process)
        assert ran.code == 2
        assert ran.err == "error: stopped before the gateway was ready\n"

    asyncio.run(run())


def test_nobody_there_is_one_line() -> None:
    ran = load("--url", "http://127.0.0.1:1")
    assert ran.code == 2
    assert ran.err.startswith("error: no gateway is ready at http://127.0.0.1:1 (")
    assert ran.err.count("\n") == 1
    assert ran.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "1", "--trace", "x.jsonl"], "--rate and --trace are two loads"),
        (["--rate", "1", "--honour-retry-after"], "is for the closed loop"),
        (["--prompt-tokens", "many"], "is no token count"),
        (["--token-ids", "9-3"], "two token ids are needed"),
        (["--concurrency", "0"], "--concurrency"),
        (["--url", "here"], "is no HTTP address"),
        (["--output", "/dev/null/x"], "name a file that can be written"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    flags: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_password_in_the_address_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--url", "http://me:hush@host", "--ready-timeout-s", "1"]) == 2
    said = capsys.readouterr().err
    assert "waiting for http://host" in said
    assert "url='http://host' is no HTTP address" in said
    assert "hush" not in said


def test_a_trace_that_is_not_there_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(tmp_path) as cluster:
            ran = await load_of(cluster, *PATIENT, "--trace", str(tmp_path / "none.jsonl"))
            assert ran.code == 2
            assert "cannot be read" in ran.err
            assert not cluster.workers[0].calls

    asyncio.run(run())


def test_a_trace_with_a_bad_line_is_reported_up_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        rows = ["2023-11-16 18:15:40.0,20,5", "2023-11-16 18:15:40.1,20,6", "2023-11-16 18:15:40.2,20,0"]
        trace = tmp_path / "t.csv"
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        async with fake_cluster(tmp_path) as cluster:
            ran = await load_of(cluster, *SMALL, "--trace", str(trace))
        assert ran.code == 2
        assert ran.counts() == (2, 0, 0)
        assert ran.result["was_stopped"] is True
        assert ran.result["trace_problem"].startswith(f"{trace}:4: GeneratedTokens=0")
        assert "2 requests in" in ran.err
        assert ran.err.splitlines()[-1] == f"error: {ran.result['trace_problem']}"
        assert "Traceback" not in ran.err

    asyncio.run(run())


def test_a_plan_is_what_flags_say() -> None:
    def plan(**flags: object) -> LoadPlan:
        return LoadCommand.model_validate(flags).plan()

    open_loop = plan(requests=5, rate=3.0)
    assert (open_loop.duration_s, open_loop.num_requests, open_loop.arrivals.mode) == (None, 5, "open")
    assert plan().duration_s == 30.0
    assert plan(duration_s=4.0, requests=5).duration_s == 4.0
    assert plan(trace="x.csv").arrivals.mode == "trace"
    with pytest.raises(ConfigurationError):
        plan(turns="0")


def test_the_command_hides_its_key() -> None:
    assert command_line(["load", "--api-key", "k", "--rate", "3"]) == "tandem load --api-key '***' --rate 3"
    assert command_line(["load", "--api-key=k"]) == "tandem load '--api-key=***'"


def _num_refused(cluster: FakeCluster) -> float:
    text = cluster.gateway.gateway.metrics.text()
    lines = [line for line in text.decode().splitlines() if "capacity_exceeded" in line]
    with contextlib.suppress(IndexError, ValueError):
        return float(lines[0].rpartition(" ")[2])
    return 0.0
