"""`tandem up` as a user runs it: once with the real services, else with stubs, to test what stands around them."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest
import torch

from tandem.core.memory import total_bytes
from tests.helpers import checkpoints, command_line, stub_service
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.empty_weights import empty_weights
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

ROOT = Path(__file__).parents[2]
ROLES = ("router", "prefill", "decode", "gateway")


@dataclass
class Terminal:
    """A running `tandem up` and what it has said on both streams."""

    process: ForkedProcess | subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self, output: IO[str]) -> None:
        for line in output:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def until(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until `count` lines match."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, 60), "\n".join(self.lines)
        return found()

    def said(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is served as it is, without a chat template."""
    path = write_byte_tokenizer(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory whose `services` are stubs; `python -m` finds those of its working directory first."""
    for role in ROLES:
        (tmp_path / "services" / role).mkdir(parents=True)
        shutil.copy(stub_service.__file__, tmp_path / "services" / role / "__main__.py")
    (tmp_path / "services" / "__init__.py").touch()
    return tmp_path


@contextlib.contextmanager
def running(place: Path, *flags: str | Path, **variables: str) -> Iterator[Terminal]:
    with started(place, flags, variables) as terminal:
        yield terminal


@contextlib.contextmanager
def started(
    place: Path,
    flags: Sequence[str | Path],
    variables: Mapping[str, str],
    errors: IO[bytes] | None = None,
    program: str | None = None,
) -> Iterator[Terminal]:
    """`errors`: where standard error goes, if not to the terminal. `program`: Python code to run, which calls `up`."""
    environment = command_line.environment(**variables)
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as output:
        with open(writing, "wb") as written:
            stderr = written if errors is None else errors
            process: ForkedProcess | subprocess.Popen[bytes]
            if program is None:
                process = command_line.started(
                    *("up", *flags),
                    output=written.fileno(),
                    errors=stderr.fileno(),
                    env=environment,
                    directory=place,
                )
            else:
                command = [sys.executable, "-c", program, "up", *map(str, flags)]
                process = subprocess.Popen(command, cwd=place, env=environment, stdout=written, stderr=stderr)
        terminal = Terminal(process)
        listener = threading.Thread(target=terminal.listen, args=[output])
        listener.start()
        try:
            yield terminal
        finally:
            process.kill()
            process.wait()
            listener.join(10)


def children_of(terminal: Terminal) -> list[psutil.Process]:
    return psutil.Process(terminal.process.pid).children(recursive=True)


def test_it_says_where_it_serves_and_how_it_does_until_ctrl_c(place: Path, checkpoint: Path) -> None:
    flags = (
        *("--prefill", "2", "--port", "0", "--status-interval-s", "0.05"),
        *("--block-size", "32", "--no-prefix-caching"),
    )
    with running(place, "--model", checkpoint, *flags) as terminal:
        (match,) = terminal.until(r"^tiny-llama is served at (http://127.0.0.1:\d+)$")
        terminal.until(r"^tandem +\| ready in \d+\.\d s$")
        assert (place / "asked").read_text().split() == ["/v1/completions"] * 2, "two workers warm up before that"
        assert httpx.get(f"{match[1]}/ready", trust_env=False).status_code == 200
        assert terminal.until(rf"^curl -N {match[1]}/v1/completions .*\"model\": \"tiny-llama\", \"prompt\"")
        terminal.until(
            r"^5 of 5 processes ready · 3 running, 2 waiting · 0 prompt and \d+ output tokens/s · KV decode 25 %$"
        )
        (decode,) = terminal.until(r"^decode-0 +\| decode (.*)")
        assert "--block-size 32 --no-prefix-caching" in decode[1]
        assert "--served-model-name tiny-llama" in decode[1]
        children = children_of(terminal)
        assert len(children) == 5
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
        assert not any(child.is_running() for child in children)


def test_a_real_cluster_answers_can_be_traced_and_stops(tmp_path: Path) -> None:
    model = write_byte_tokenizer(save_tiny_llama(tmp_path / "tiny", vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))
    flags = ("--port", "0", "--quiet", "--kv-cache-gib", "0.02", "--num-threads", "1", "--no-native-kernels")
    with running(ROOT, "--model", model, *flags) as terminal:
        (match,) = terminal.until(r"^tiny is served at (http://.*)$")
        (curl,) = terminal.until(r"^curl .*")
        answer = subprocess.run(["/bin/sh", "-c", f"{curl[0]} -sS --noproxy '*' -D -"], capture_output=True, text=True)
        assert '"content"' in answer.stdout, answer
        assert "data: [DONE]" in answer.stdout
        (request_id,) = re.findall(r"^x-request-id: (\S+)", answer.stdout, flags=re.MULTILINE)
        command = [sys.executable, "-m", "tandem.cli.main", "trace", request_id, "--url", match[1]]
        trace = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert re.search(r"^pair +gateway ", trace.stdout, flags=re.MULTILINE), trace
        assert re.search(r"^decode +decode-0 ", trace.stdout, flags=re.MULTILINE), trace
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 0, terminal.lines


def test_what_dies_is_started_again_and_said(place: Path, checkpoint: Path) -> None:
    with running(place, "--model", checkpoint, "--port", "0", "--status-interval-s", "0.02") as terminal:
        terminal.until(r"is served at")
        (match,) = terminal.until(r"^prefill-0 .* pid=(\d+)")
        os.kill(int(match[1]), signal.SIGKILL)
        terminal.until(r"prefill-0 died \(SIGKILL\); starting it again in 0\.2 s")
        terminal.until(r"^3 of 4 processes ready \(not prefill-0\)")
        terminal.until(r"^prefill-0 .* pid=(\d+)", count=2)


def test_no_prefill_workers_means_aggregated(place: Path, checkpoint: Path) -> None:
    with running(place, "--model", checkpoint, "--port", "0", "--prefill", "0", "--quiet") as terminal:
        terminal.until(r"is served at")
        assert not terminal.said(r"^prefill")
        assert not terminal.said(r"processes ready")


def test_a_refused_configuration_ends_it_with_the_message(place: Path, checkpoint: Path) -> None:
    with running(place, "--model", checkpoint, "--port", "0", TANDEM_STUB_REFUSES="decode") as terminal:
        assert terminal.process.wait(30) == 2
        terminal.until(r"error: decode-0 cannot start: error: --block-size=7: no")


def test_a_mistake_is_one_line_before_anything_starts(place: Path) -> None:
    with running(place, "--model", "./nowhere") as terminal:
        assert terminal.process.wait(30) == 2
        terminal.until(re.escape("'./nowhere' is not a directory"))
        assert len(terminal.lines) == 1


def test_its_own_variables_become_flags_and_others_pass_through(place: Path, checkpoint: Path) -> None:
    variables = {"TANDEM_PREFILL": "0", "TANDEM_DTYPE": "float32", "TANDEM_PORT": "0", "TANDEM_LOG_LEVEL": "debug"}
    with running(place, "--model", checkpoint, "--quiet", **variables) as terminal:
        (decode,) = terminal.until(r"^decode-0 +\| decode (.*)")
        assert "--dtype float32" in decode[1]
        assert "['TANDEM_CLUSTER_SECRET', 'TANDEM_LOG_LEVEL']" in decode[1]


def test_settings_of_services_are_flags_and_a_mistyped_variable_is_told(place: Path, checkpoint: Path) -> None:
    flags = ("--model", checkpoint, "--port", "0", "--quiet", "--policy", "round-robin", "--accounts", "keys.db")
    with running(place, *flags, TANDEM_POLICIY="random") as terminal:
        terminal.until(r"TANDEM_POLICIY is set but has no effect here; TANDEM_POLICY is the nearest that has one")
        terminal.until(r"^tandem +\| starting 4 processes: router-0, prefill-0, decode-0, gateway$")
        terminal.until(r"is served at")
        terminal.until(r"^curl .*authorization: Bearer")
        assert not (place / "asked").exists(), "nothing is asked without a key"
        environments = [child.environ() for child in children_of(terminal)]
        assert {each["TANDEM_POLICY"] for each in environments} == {"round-robin"}
        assert {each["TANDEM_ACCOUNTS"] for each in environments} == {"keys.db"}


def test_without_a_model_and_without_an_index_the_demo_is_served(place: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place), "TANDEM_CACHE_DIR": str(place / "cache")}
    with running(place, "--port", "0", "--quiet", "--no-native-kernels", **variables) as terminal:
        terminal.until(r"^tandem +\| fetching SmolLM2-135M-Instruct \(89 MiB\) with pip into .*, once$")
        terminal.until(r"SmolLM2-135M-Instruct cannot be fetched \(pip: .*; serving the bundled demo, whose answers")
        terminal.until(r"^tandem-demo is served at")


def test_the_default_model_by_its_name_is_not_replaced(place: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place), "TANDEM_CACHE_DIR": str(place / "cache")}
    with running(place, "--model", "SmolLM2-135M-Instruct", **variables) as terminal:
        assert terminal.process.wait(60) == 2
        terminal.until(r"^error: SmolLM2-135M-Instruct cannot be fetched")


def test_a_port_that_is_taken_is_refused_before_anything_starts(place: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(place, "--model", checkpoint, "--port", str(port)) as terminal:
            assert terminal.process.wait(60) == 2
            terminal.until(rf"^error: port={port}: nothing can listen at 127.0.0.1:{port} \(Address already in use\)")
            assert len(terminal.lines) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method=.*aqlm.* is not served"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures=.* is not served; supported: DeepseekV2ForCausalLM"),
        pytest.param({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic", marks=pytest.mark.slow),
        pytest.param({"layer_types": ["sideways"] * 3}, "layer_types=.*sideways", marks=pytest.mark.slow),
        pytest.param(
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 9},
            r"num_experts_per_tok must be an integer in \[1, 8\], found 9",
            marks=pytest.mark.slow,
        ),
        ({}, "has no tokenizer.json"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_starts(
    place: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """Regression: each of these was told after 7 to 24 seconds; a missing tokenizer where the format was at fault."""
    model = save_tiny_llama(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    with running(place, "--model", model, "--port", "0") as terminal:
        assert terminal.process.wait(60) == 2
        terminal.until(f"^error: .*{message}")
        assert len(terminal.lines) == 1


def _without_a_matrix_of_an_expert(path: Path) -> None:
    tensors = checkpoints.read_tensors(path)
    del tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    checkpoints.write_tensors(path, tensors)


def _with_a_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    """Adds one to the second layer's experts, or replaces it."""

    def change(path: Path) -> None:
        tensors = checkpoints.read_tensors(path)
        tensors[f"model.layers.1.block_sparse_moe.{name}.weight"] = torch.zeros(shape)
        checkpoints.write_tensors(path, tensors)

    return change


def _with_experts_beyond_memory(path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 1 << 20, "num_hidden_layers": 1}
    num_experts = max(2, 1 + total_bytes() // (3 * 2 * sizes["hidden_size"] * sizes["intermediate_size"]))
    empty_weights(checkpoints.edit_config(path, **sizes, num_local_experts=num_experts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_matrix_of_an_expert, r"lacks model\.layers\.1\.block_sparse_moe\.experts\.5\.w2\.weight.*download"),
        pytest.param(
            _with_a_tensor("experts.8.w1", 64, 64), r"experts\.8\.w1.*no place.*download", marks=pytest.mark.slow
        ),
        pytest.param(
            _with_a_tensor("experts.3.w1", 48, 64),
            r"experts\.3\.w1\.weight has shape \[48, 64\].*\[64, 64\].*download",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _with_a_tensor("gate", 9, 64),
            r"gate\.weight has shape \[9, 64\].*\[8, 64\].*download",
            marks=pytest.mark.slow,
        ),
        (
            _with_experts_beyond_memory,
            r"take .* GB in float32, .* of them experts, and cpu has .*; serve it on a machine",
        ),
    ],
)
def test_experts_that_cannot_be_served_end_all_processes(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    """Of the real services: told by a worker before any is ready, and once."""
    model = write_byte_tokenizer(checkpoints.save_tiny_mixtral(tmp_path / "tiny", vocab_size=NUM_TOKENS))
    change(model)
    flags = ("--port", "0", "--kv-cache-gib", "0.02", "--num-threads", "1", "--no-native-kernels", "--prefill", "0")
    with running(ROOT, "--model", model, *flags, RUN=str(tmp_path)) as terminal:
        terminal.until(r"starting 3 processes")
        assert terminal.process.wait(120) == 2, terminal.lines
        terminal.until(f"error: decode-0 cannot start: .*{message}")
        assert not terminal.said("is served at")
        environments = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
        assert not any(environment.get("RUN") == str(tmp_path) for environment in environments)


def secrets_of(place: Path, checkpoint: Path, *flags: str, **variables: str) -> set[str]:
    """The cluster secrets of all processes of one run."""
    with running(place, "--model", checkpoint, "--port", "0", "--quiet", *flags, **variables) as terminal:
        terminal.until(r"is served at")
        return {child.environ()["TANDEM_CLUSTER_SECRET"] for child in children_of(terminal)}


def test_every_run_draws_a_secret_that_all_its_processes_share(place: Path, checkpoint: Path) -> None:
    (first,), (second,) = secrets_of(place, checkpoint), secrets_of(place, checkpoint)
    assert first != second
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 32


def test_a_secret_that_was_given_is_kept(place: Path, checkpoint: Path) -> None:
    given = {"TANDEM_CLUSTER_SECRET": "the same for every machine"}
    flags = ("--redis", "redis://127.0.0.1:1")
    assert secrets_of(place, checkpoint, *flags, **given) == {"the same for every machine"}


def test_logs_go_to_a_file_each(place: Path, checkpoint: Path) -> None:
    with running(place, "--model", checkpoint, "--port", "0", "--log-dir", place / "logs") as terminal:
        terminal.until(r"is served at")
        assert {path.name for path in (place / "logs").iterdir()} == {
            "router-0.log",
            "prefill-0.log",
            "decode-0.log",
            "gateway.log",
        }
        assert "--worker-id decode-0" in (place / "logs" / "decode-0.log").read_text()
        assert not terminal.said(r"^decode-0 +\|")


def test_full_disks_under_the_logs_do_not_end_it(place: Path, checkpoint: Path) -> None:
    """Regression: the first log line that a disk did not take stopped the whole system."""
    (place / "logs").mkdir()
    (place / "logs" / "decode-0.log").symlink_to("/dev/full")
    with running(place, "--model", checkpoint, "--port", "0", "--log-dir", place / "logs") as terminal:
        terminal.until(r"is served at")
        terminal.until(r"decode-0\.log cannot be written \(No space left on device\): lines are dropped until it can")
        assert "--worker-id prefill-0" in (place / "logs" / "prefill-0.log").read_text()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0, terminal.lines
        terminal.until(r"decode-0\.log is closed; \d+ lines? w(as|ere) dropped")


def test_a_full_disk_under_standard_error_does_not_end_it(place: Path, checkpoint: Path) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        started(place, ("--model", checkpoint, "--port", "0"), {}, errors=full) as terminal,
    ):
        terminal.until(r"is served at")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0, terminal.lines


def test_a_killed_terminal_leaves_nothing(place: Path, checkpoint: Path) -> None:
    with running(place, "--model", checkpoint, "--port", "0") as terminal:
        terminal.until(r"is served at")
        children = children_of(terminal)
        terminal.process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
