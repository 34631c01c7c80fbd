"""TLS as users meet it: real processes with certificates, and services that would speak plain text to others."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import aclosing, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.core.errors import TandemError, WorkerLostError
from tandem.process.ports import free_ports
from tandem.rpc import caller_watch
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.tls.authority import Authority
from tandem.tls.files import CA, TlsFiles
from tandem.tls.identity import CertifiedRole
from tests.e2e.test_up import ROOT, children_of, running, started
from tests.helpers import command_line
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.secret import SECRET
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = ("--kv-cache-gib", "0.02", "--num-threads", "1", "--no-native-kernels", "--transport", "tcp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = save_tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny", vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1
    )
    return write_byte_tokenizer(tiny)


def answers_plain_text(port: int) -> bool:
    """Whether anything comes from a gRPC server (HTTP/2 settings) or our transport (its hello) without TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.settimeout(0.5)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        try:
            heard = connection.recv(64)
        except (TimeoutError, ConnectionError):
            return False
    return heard[:1] != b"\x15" and bool(heard)  # NOTE: 21 is an alert of TLS


def listened_ports(process: psutil.Process) -> set[int]:
    """Of gRPC and of our transport."""
    arguments = process.cmdline()
    metrics = int(arguments[arguments.index("--metrics-port") + 1])
    found = {entry.laddr.port for entry in process.net_connections("tcp") if entry.status == "LISTEN"}
    return found - {metrics}


@pytest.mark.parametrize("flags", [(), ("--tls",)], ids=["plain", "TLS"])
def test_up_encrypts_what_its_processes_say_if_told(flags: tuple[str, ...], model: Path) -> None:
    with running(ROOT, "--model", model, "--port", "0", "--quiet", *flags, *FLAGS) as terminal:
        (match,) = terminal.until(r"^tiny is served at (http://.*)$")
        asked = {"model": "tiny", "prompt": list(range(1, 60)), "max_tokens": 4}
        answer = httpx.post(f"{match[1]}/v1/completions", json=asked, timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        processes = children_of(terminal)
        directories = {each.environ().get("TANDEM_TLS_DIR") for each in processes}
        for process in processes:
            if "services.gateway" not in process.cmdline():
                answered = {answers_plain_text(port) for port in listened_ports(process)}
                assert answered == {not flags}, process.cmdline()
        if flags:
            paths = [Path(each or "") for each in directories]
            assert {path.name for path in paths} == {"gateway", "router", "worker"}
            for path in paths:
                assert (path.stat().st_mode | (path / "tls.key").stat().st_mode) & 0o077 == 0
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 0, terminal.lines
        assert not any(Path(each).exists() for each in directories if each)


RENEWING = """
import sys, time
from tandem.cli.main import main
from tandem.tls import renewal
renewal.CHECK_INTERVAL_S = 4.0
make = renewal.RenewedCertificates.__init__
renewal.RenewedCertificates.__init__ = lambda *given: make(*given, now_s=lambda: time.time() * 1e8)
sys.exit(main())
"""


def test_certificates_are_renewed_while_requests_run(model: Path) -> None:
    """Every four seconds, by `tandem up`, for whose clock a third of a year goes by. The second renewal takes the
    authority away that signed what processes started with.
    """
    asked = {"model": "tiny", "prompt": list(range(1, 60)), "max_tokens": 80, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    with started(ROOT, ("--model", model, "--port", "0", "--quiet", "--tls", *FLAGS), {}, program=RENEWING) as up:
        (match,) = up.until(r"^tiny is served at (http://.*)$")
        (directory,) = {Path(each.environ()["TANDEM_TLS_DIR"]).parent for each in children_of(up)}
        first, num_crossed = (directory / "worker/ca.crt").read_bytes(), 0
        seen: set[bytes] = set()
        with httpx.Client(base_url=match[1], timeout=30, trust_env=False) as client:
            while num_crossed < 1 or len(seen) < 4:
                before = (directory / "worker/tls.crt").read_bytes()
                with client.stream("POST", "/v1/completions", json=asked) as answer:
                    *_, usage = [line for line in answer.iter_lines() if line.startswith("data: {")]
                assert '"completion_tokens":80' in usage, usage
                after = (directory / "worker/tls.crt").read_bytes()
                num_crossed += before != after
                seen |= {before, after}
        authorities = (directory / "worker/ca.crt").read_text().split("-----BEGIN")
        assert not [each for each in authorities[1:] if each.encode() in first]
        used = {match[1] for match in up.until(r"(\S+) .*new certificates of .* are in use", 8)}
        assert len(used) >= 3, up.lines
        assert not up.said("Traceback"), up.lines
        assert {each.status() for each in children_of(up)} <= {psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING}
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) == 0, up.lines


def test_a_withdrawn_peer_is_cut_off_and_others_are_not(model: Path, tmp_path: Path) -> None:
    """A real worker, whose `ca.crt` loses one of two authorities while each has signed the caller of a stream."""
    ours, others = Authority("up"), Authority("up")

    def trust(*authorities: Authority) -> None:
        (tmp_path / "new").write_bytes(b"".join(each.certificate for each in authorities))
        (tmp_path / "new").rename(tmp_path / "worker" / CA)

    async def check(address: str) -> None:
        trust(ours, others)
        others.write(tmp_path / "gone", CertifiedRole.OPERATOR, ca=ours.certificate + others.certificate)
        files = [TlsFiles(tmp_path / each, CertifiedRole.OPERATOR) for each in ("operator", "gone")]
        kept, gone = (WorkerClient(address, Credentials(SECRET, ProcessRole.OPERATOR, tls=each)) for each in files)
        await answers(kept)
        async with aclosing(kept.watch(0.05)) as kept_stream, aclosing(gone.watch(0.05)) as gone_stream:
            assert {(await anext(each)).lifecycle for each in (kept_stream, gone_stream)} == {"ready"}
            trust(ours)

            async def both_go_on() -> None:
                async for _ in gone_stream:
                    assert (await anext(kept_stream)).lifecycle == "ready"

            with pytest.raises(TandemError, match="is not accepted any more"):
                await asyncio.wait_for(both_go_on(), caller_watch.CHECK_INTERVAL_S + 10)
            with pytest.raises(TandemError):
                await gone.status()
            assert (await anext(kept_stream)).lifecycle == "ready"
            assert await kept.status()
        await asyncio.gather(kept.close(), gone.close())

    address = f"127.0.0.1:{free_ports(1, '127.0.0.1', random.SystemRandom())[0]}"
    for role in (CertifiedRole.WORKER, CertifiedRole.OPERATOR):
        ours.write(tmp_path / role, role)
    log = (tmp_path / "log").open("wb")
    decode = subprocess.Popen(
        [sys.executable, "-m", "services.decode", "--model", str(model), "--bind", address, *FLAGS],
        cwd=ROOT,
        env=clean_environment() | {"TANDEM_TLS_DIR": str(tmp_path / "worker")},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        asyncio.run(check(address))
        assert decode.poll() is None
    except BaseException as error:
        error.add_note((tmp_path / "log").read_text())
        raise
    finally:
        decode.kill()
        decode.wait()
        log.close()


async def answers(client: WorkerClient) -> None:
    """Waits for a process that starts."""
    async with asyncio.timeout(60):
        while True:
            with suppress(WorkerLostError):
                if (await client.status()).lifecycle == "ready":
                    return
            await asyncio.sleep(0.1)


def clean_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return environment | {"TANDEM_CLUSTER_SECRET": SECRET.decode()}


def start(role: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return command_line.run(*flags, module=f"services.{role}", env=clean_environment() | variables, timeout_s=60)


@pytest.mark.parametrize(
    "role",
    ["router", "prefill", "gateway", *(pytest.param(role, marks=pytest.mark.slow) for role in ("decode", "planner"))],
)
def test_no_service_speaks_plain_text_to_others_unasked(model: Path, role: str) -> None:
    flags = {
        "router": ("--bind", "0.0.0.0:0"),
        "prefill": ("--model", str(model), "--bind", "0.0.0.0:0", "--advertise", "127.0.0.1:1"),
        "decode": ("--model", str(model), "--bind", "0.0.0.0:0", "--advertise", "127.0.0.1:1"),
        "gateway": ("--model", str(model), "--port", "0", "--routers", "192.0.2.1:7800"),
        "planner": ("--gateways", "127.0.0.1:1", "--routers", "192.0.2.1:7800", "--metrics-port", "0"),
    }[role]
    done = start(role, *flags)
    assert done.returncode == 2, done.stderr
    assert "is beyond this machine, where processes need TLS: set --tls-dir" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_certificate_of_no_use_is_named(tmp_path: Path) -> None:
    Authority("chat.default").write(tmp_path, CertifiedRole.WORKER)
    done = start("router", TANDEM_TLS_DIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/tls.crt is for a worker")
