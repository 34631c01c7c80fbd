"""What `helm test` runs, run here: against a gateway that answers, and against those that do not."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helm.renders import rendered

WORDS = [" Paris", ", of", " course."]
Answers = dict[str, Any]


class _Gateway(BaseHTTPRequestHandler):
    """Answers as the server's `answers` say; `refusals` are used up first."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers: Answers = self.server.answers  # type: ignore[attr-defined]
        answers["asked"].append((self.path, asked))
        if self.headers["authorization"] != answers["authorization"]:
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
    defaults = {"asked": [], "authorization": None, **answering}
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
    container = rendered("minimal").of_kind("Pod")[0]["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"]}
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
