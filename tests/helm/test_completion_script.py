"""The script of `helm test`, run against a gateway that answers, and against those that do not."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.accounts.key import AccountKey
from tandem.accounts.open import open_store
from tandem.core.clock import SystemClock
from tests.helm.renders import rendered
from tests.helpers.helm import ROOT

WORDS = [" Paris", ", of", " course."]
Answers = dict[str, Any]


class _Gateway(BaseHTTPRequestHandler):
    """Answers as the server's `answers` say; `refusals` are used up first."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers: Answers = self.server.answers  # type: ignore[attr-defined]
        answers["asked"].append((self.path, asked))
        if not re.fullmatch(answers["authorization"], self.headers["authorization"] or ""):
            self._send(401, b'{"error": {"message": "no API key"}}')
        elif answers["refusals"]:
            self._send(answers["refusals"].pop(), b'{"error": {"message": "no live decode worker"}}')
        elif asked["stream"]:
            self._send(200, "".join(f"data: {frame}\n\n" for frame in answers["frames"]).encode())
        else:
            usage = {"completion_tokens": answers["num_tokens"]}
            self._send(200, json.dumps({"choices": [{"text": "".join(WORDS)}], "usage": usage}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _serving(**answers: Any) -> Iterator[tuple[str, list[Any]]]:
    frames = [json.dumps({"choices": [{"text": word}]}) for word in WORDS]
    usage = json.dumps({"choices": [], "usage": {}})
    answering = {"refusals": [], "frames": [*frames, usage, "[DONE]"], "num_tokens": 3}
    defaults = {"asked": [], "authorization": "", **answering}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    server.answers = {**defaults, **answers}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.answers["asked"]  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _run(url: str, timeout_s: float = 30.0, **extra: str) -> subprocess.CompletedProcess[str]:
    return _run_case("anonymous", url, timeout_s, **extra)


def _run_case(case: str, url: str, timeout_s: float, **extra: str) -> subprocess.CompletedProcess[str]:
    container = rendered(case).of_kind("Pod")[0]["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert env["GATEWAY_URL"] == "http://demo-tandem-gateway:8000"
    command = [sys.executable, *container["command"][1:], *container["args"]]
    own = {**env, "GATEWAY_URL": url, "TIMEOUT_S": str(timeout_s), **extra}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)


def test_a_gateway_that_answers_passes() -> None:
    with _serving(refusals=[503]) as (url, asked):
        done = _run(url)
    assert done.returncode == 0, done.stderr
    assert "3 tokens, streamed alike: ' Paris, of course.'" in done.stdout
    assert [path for path, _ in asked] == ["/v1/completions"] * 3
    assert [body["stream"] for _, body in asked] == [False, False, True]
    assert asked[-1][1]["model"] == "Qwen/Qwen3-8B"
    assert asked[-1][1]["temperature"] == 0


def test_a_gateway_with_accounts_is_shown_a_key() -> None:
    """Regression: there was no way to send one, and the test could only end in 401."""
    container = rendered("accounts").of_kind("Pod")[0]["spec"]["containers"][0]
    (given,) = [each for each in container["env"] if each["name"] == "TANDEM_API_KEY"]
    assert given["valueFrom"] == {"secretKeyRef": {"name": "tests", "key": "api-key"}}
    with _serving(authorization="Bearer sk-tandem-x") as (url, _):
        done = _run(url, TANDEM_API_KEY="sk-tandem-x")
    assert done.returncode == 0, done.stderr


async def _keys(accounts: Path) -> list[AccountKey]:
    store = open_store(str(accounts), SystemClock())
    try:
        return list(await store.all_keys())
    finally:
        await store.close()


def _with_tandem(accounts: str) -> dict[str, str]:
    """Variables of the image in addition to those of the pod, and the place of this test's accounts."""
    return {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT), "TANDEM_ACCOUNTS": accounts}


def test_without_a_key_one_is_drawn_and_revoked(tmp_path: Path) -> None:
    """Regression: with accounts, which are on by default, it needed a key from a Secret of the operator."""
    accounts = tmp_path / "accounts.db"
    with _serving(authorization=r"Bearer sk-tandem-[0-9a-f]{12}-\S+") as (url, _):
        done = _run_case("minimal", url, 30.0, **_with_tandem(str(accounts)))
    assert done.returncode == 0, done.stderr
    assert "3 tokens, streamed alike" in done.stdout
    (key,) = asyncio.run(_keys(accounts))
    assert (key.name, key.is_admin, key.is_live) == ("helm test", False, False)


def test_a_key_is_revoked_after_a_failure_too(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts.db"
    with _serving(refusals=[400]) as (url, _):
        done = _run_case("minimal", url, 30.0, **_with_tandem(str(accounts)))
    assert done.returncode == 1
    assert "answered 4" in done.stderr
    assert [key.is_live for key in asyncio.run(_keys(accounts))] == [False]


def test_a_key_that_cannot_be_drawn_is_told() -> None:
    with _serving() as (url, asked):
        done = _run_case("minimal", url, 0.0, **_with_tandem("redis://127.0.0.1:1/0"))
    assert done.returncode == 1
    assert "no API key could be drawn" in done.stderr
    assert not asked


def test_load_draws_an_administrators_key_unless_it_is_given_one() -> None:
    job = rendered("load").of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
    words = job["args"][1:]
    assert words[:6] == ["TANDEM_LOAD_API_KEY", "--name", "load", "--admin", "--", "tandem"]
    assert "TANDEM_ACCOUNTS" in {each["name"] for each in job["env"]}
    for case in ("load-elsewhere", "example-cpu-load"):
        own = rendered(case).of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
        assert own["command"] == ["tandem", "load"]
        assert "TANDEM_ACCOUNTS" not in {each["name"] for each in own["env"]}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"authorization": "Bearer sk-tandem-x"}, "answered 401: .*no API key"),
        ({"refusals": [400]}, "answered 400"),
        ({"refusals": [503] * 9}, "answered 503: .*no live decode worker"),
        ({"num_tokens": 0}, "no token was generated"),
        ({"frames": [json.dumps({"choices": [{"text": "Rome"}]}), "[DONE]"]}, "the stream says 'Rome'"),
        ({"frames": [json.dumps({"choices": [{"text": "".join(WORDS)}]})]}, "the stream has no end"),
        ({"frames": []}, "the stream has no end"),
    ],
)
def test_a_gateway_that_fails_is_told(answers: Answers, words: str) -> None:
    with _serving(**answers) as (url, _):
        done = _run(url, timeout_s=0)
    assert done.returncode == 1
    assert re.search(words, done.stderr), done.stderr


def test_nobody_there_is_told() -> None:
    with _serving() as (url, _):
        pass
    done = _run(url, timeout_s=0)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
