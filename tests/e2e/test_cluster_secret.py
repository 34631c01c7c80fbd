"""The cluster's secret as users and intruders meet it: real processes, and another user of the same machine."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.engine.resolve import assemble
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.messages import Greeting, WorkerAddress
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.transport.card import Card, Identity, unseal
from tandem.worker.identity import compatibility_of
from tandem.worker.settings import DecodeSettings
from tests.e2e.test_up import ROOT, Terminal, children_of, running
from tests.helpers import command_line
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.intruder import NOBODY
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

# NOTE: with which every cluster without a secret of its own once sealed its cards
FORMER_CONSTANT = hashlib.sha256(b"tandem on a single machine").digest()
VARIABLE = "TANDEM_CLUSTER_SECRET"
REMEDY = "`export TANDEM_CLUSTER_SECRET=$(openssl rand -hex 32)`"
ENGINE = {"kv_cache_gib": 0.02, "num_threads": 1, "native_kernels": False}
FLAGS = ("--kv-cache-gib", "0.02", "--num-threads", "1", "--no-native-kernels", "--transport", "tcp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = save_tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny", vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1
    )
    return write_byte_tokenizer(tiny)


def secret_of(process: psutil.Process) -> str:
    return process.environ()[VARIABLE]


def service(terminal: Terminal, role: str) -> psutil.Process:
    return next(each for each in children_of(terminal) if f"services.{role}" in each.cmdline())


def address_of(worker: psutil.Process) -> str:
    arguments = worker.cmdline()
    return arguments[arguments.index("--bind") + 1]


async def card_of(address: str, secret: bytes, model: Path) -> Card:
    """Card by which peers read the worker's pool over TCP, as they receive it."""
    settings = DecodeSettings.model_validate({"model": str(model), **ENGINE})
    assembly = await asyncio.to_thread(assemble, settings.engine_config())
    client = WorkerClient(address, Credentials(secret, ProcessRole.DECODE))
    try:
        greeting = Greeting(
            worker=WorkerAddress("test", "127.0.0.1:1", "0" * 32),
            epoch=1,
            protocol_version=PROTOCOL_VERSION,
            compatibility=compatibility_of(assembly),
            site={},
            cards={},
            num_blocks=assembly.arena.num_pages,
        )
        cards = (await client.greet(greeting)).cards
    finally:
        await client.close()
    return unseal(cards["tcp"], Identity({}, secret))


def intrude(worker: psutil.Process, card: Card, secret: bytes) -> dict[str, Any]:
    """Findings of another user who knows the worker's ports and card, and tries `secret`."""
    told = {
        "pid": worker.pid,
        "address": address_of(worker),
        "secret": secret.hex(),
        "card": asdict(card) | {"metadata": card.metadata.hex()},
    }
    command = [sys.executable, "-m", "tests.helpers.intruder", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_another_user_who_knows_the_ports_reads_no_kv(model: Path) -> None:
    """Regression: without a secret, a constant of the source code opened whole pools to every user of the machine."""
    with running(ROOT, "--model", model, "--port", "0", "--quiet", *FLAGS) as terminal:
        (match,) = terminal.until(r"^tiny is served at (http://.*)$")
        asked = {"model": "tiny", "prompt": list(range(1, 60)), "max_tokens": 2}
        httpx.post(f"{match[1]}/v1/completions", json=asked, timeout=30, trust_env=False).raise_for_status()
        worker = service(terminal, "decode")
        secret = secret_of(worker)
        card = asyncio.run(card_of(address_of(worker), secret.encode(), model))

        member = intrude(worker, card, secret.encode())
        assert int(member["pool"]) > 0, "what the test rests on: with the secret the KV is read"
        assert member["status"] == "decode-0"

        intruder = intrude(worker, card, FORMER_CONSTANT)
        assert intruder["pool"].startswith("refused: ")
        assert "secret" in intruder["pool"]
        assert intruder["status"].startswith("refused: ")
        if is_another := os.geteuid() == 0:
            assert intruder["user"] == NOBODY
            assert "Permission denied" in intruder["environment"]

        processes = [psutil.Process(terminal.process.pid), *children_of(terminal)]
        assert len(processes) == 5
        assert not [each.cmdline() for each in processes if secret in " ".join(each.cmdline())]
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 0, terminal.lines
    if not is_another:
        pytest.skip(
            "only root can start another user's process: the environment is unchecked, and the rest as one user"
        )


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "gateway", "planner"])
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("0.0.0.0", marks=pytest.mark.slow)])
def test_no_service_starts_without_a_secret(model: Path, role: str, host: str) -> None:
    """Nor on loopback, which all users of the machine share."""
    flags = {
        "router": ("--bind", f"{host}:0"),
        "prefill": ("--model", model, "--bind", f"{host}:0", "--advertise", "127.0.0.1:1"),
        "decode": ("--model", model, "--bind", f"{host}:0", "--advertise", "127.0.0.1:1"),
        "gateway": ("--model", model, "--host", host, "--port", "0", "--allow-anonymous"),
        "planner": ("--gateways", "127.0.0.1:1", "--host", host, "--metrics-port", "0"),
    }[role]
    done = command_line.run(*flags, module=f"services.{role}", timeout_s=60)
    assert done.returncode == 2, done.stderr
    needed_by = "routers='127.0.0.1:7800'" if role in ("gateway", "planner") else f"bind='{host}:0'"
    assert done.stderr.splitlines()[-1].startswith(f"error: {needed_by} needs a cluster secret")
    assert REMEDY in done.stderr
    assert "--cluster-secret" in done.stderr
    assert "Traceback" not in done.stderr
