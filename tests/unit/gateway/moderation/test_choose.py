"""A moderator is named by a setting; an endpoint is asked as OpenAI's moderation API is."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError, UnavailableError
from tandem.gateway.moderation.base import ModerationVerdict
from tandem.gateway.moderation.blocklist import Blocklist
from tandem.gateway.moderation.choose import choose_moderator
from tandem.gateway.moderation.endpoint import ModerationEndpoint


class Judge(BaseHTTPRequestHandler):
    """Flags what holds "bad"; answers nonsense to "nonsense", no result to "silence", and 500 to "broken".

    "key": flagged with what it was.
    """

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        self.send_response(500 if text == "broken" else 200)
        self.end_headers()
        flagged = {"flagged": "bad" in text, "categories": {"hate": False, "violence": "bad" in text}}
        if text == "key":
            flagged = {"flagged": True, "categories": {self.headers["authorization"]: True}}
        body = {"results": "x"} if text == "nonsense" else {"id": "1", "results": [flagged] * (text != "silence")}
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/moderations"
        server.shutdown()
        thread.join()


def judge(url: str, text: str) -> ModerationVerdict:
    async def run() -> ModerationVerdict:
        endpoint = ModerationEndpoint(url)
        try:
            return await endpoint.judge(text)
        finally:
            await endpoint.close()

    return asyncio.run(run())


def test_an_endpoint_says_what_it_flags_and_why(url: str) -> None:
    assert judge(url, "good") == ModerationVerdict()
    assert judge(url, "a bad thing") == ModerationVerdict("violence")


@pytest.mark.parametrize("text", ["broken", "nonsense", "silence"])
def test_no_verdict_is_an_error_and_never_a_pass(url: str, text: str) -> None:
    with pytest.raises(UnavailableError, match="no verdict"):
        judge(url, text)


def test_an_endpoint_that_is_away_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="no verdict"):
        judge("http://127.0.0.1:9/", "good")


def test_a_password_is_sent_and_told_nobody(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says where the endpoint is, and httpx logs each address that it asks; API clients are not told either."""
    caplog.set_level(logging.INFO)
    guarded = url.replace("//", "//me:hush@")
    assert judge(guarded, "key") == ModerationVerdict("Basic bWU6aHVzaA==")
    with pytest.raises(UnavailableError, match="no verdict") as broken:
        judge(guarded, "broken")
    assert "127.0.0.1" not in str(broken.value)
    assert "hush" not in caplog.text
    assert url in caplog.text


@pytest.mark.parametrize("name", ["http://me:hush@", "http://me:hush#@host", "HTTP://me:hush@host"])
def test_an_endpoint_that_is_refused_is_told_without_its_password(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?i)moderation='http://(host)?'") as refused:
        choose_moderator(name)
    assert "hush" not in str(refused.value)


def test_names(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("bad")
    assert choose_moderator(None) is None
    assert choose_moderator("") is None
    assert isinstance(choose_moderator(f"blocklist:{tmp_path / 'words'}"), Blocklist)
    endpoint = choose_moderator("https://example.invalid/v1/moderations")
    assert isinstance(endpoint, ModerationEndpoint)
    asyncio.run(endpoint.close())
    made = choose_moderator("python:tests.unit.gateway.moderation.test_choose:always")
    assert isinstance(made, Blocklist)


def always() -> Blocklist:
    """Moderator that an operator's own module might make."""
    return Blocklist(["always"])


@pytest.mark.parametrize(
    "name", ["other:x", "blocklist:", "python:", "python:no.such.module:x", "python:json:nothing", "python:json:dumps"]
)
def test_a_name_that_is_nobodys_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="moderation="):
        choose_moderator(name)
