"""A file on a server, read by ranges, from a server that lies, fails or has another file by now."""

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest

from tandem.core.errors import CheckpointError, CorruptCheckpointError
from tandem.models import ranged_file
from tandem.models.ranged_file import MAX_BYTES, NoRangesError, RangedFile

FIRST = 1 << 19
CONTENT = bytes(range(251)) * 24_000  # not quite 12 of `FIRST`
NAME = Path("a/b@c/m.gguf")

Answer = Callable[[int, int], httpx.Response]


def range_of(start: int, end: int, content: bytes = CONTENT, **headers: str) -> httpx.Response:
    """Answer of an honest server; `headers` replace its own, with _ for -."""
    body = content[start:end]
    told = {"content_range": f"bytes {start}-{start + len(body) - 1}/{len(content)}", "etag": "x"} | headers
    return answered(206, body, {name.replace("_", "-"): text for name, text in told.items()})


def answered(status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(body), headers=headers)


class Server:
    """`answers`: to each request in turn; after them it is honest."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[tuple[int, int]] = []
        self._answers = [*answers]

    def open(self) -> RangedFile:
        return RangedFile(NAME, "http://hub/m.gguf", httpx.Client(transport=httpx.MockTransport(self._handle)))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        self.asked.append((first, last + 1))
        answer = self._answers.pop(0) if self._answers else range_of
        return answer(first, last + 1)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_file, "_WAITS_S", (0.0, 0.0))


def test_a_header_is_fetched_in_ranges_that_grow_and_each_byte_once() -> None:
    server = Server()
    file = server.open()
    assert len(file) == len(CONTENT)
    for start, end in ((0, 4), (4, 100), (100, FIRST), (FIRST, FIRST + 1), (FIRST + 1, 3 * FIRST)):
        assert file.header(start, end) == CONTENT[start:end]
    assert server.asked == [(0, FIRST), (FIRST, 2 * FIRST), (2 * FIRST, 4 * FIRST)]
    assert file.header(0, len(CONTENT)) == CONTENT
    assert server.asked[3:] == [(4 * FIRST, len(CONTENT))]


def test_a_tensor_is_a_range_of_its_own() -> None:
    server = Server()
    file = server.open()
    assert file.read(10, 20, "tensor 'a'").tobytes() == CONTENT[10:30]
    end = len(CONTENT)
    assert file.read(end - 64, 64, "tensor 'b'").tobytes() == CONTENT[end - 64 :]
    assert server.asked == [(0, FIRST), (end - 64, end)]


def test_a_file_shorter_than_the_first_range() -> None:
    file = Server(lambda start, end: range_of(start, end, b"short")).open()
    assert len(file) == len(b"short")
    assert file.header(0, 5) == b"short"


def test_what_passes_is_asked_again() -> None:
    def unreachable(*_: int) -> httpx.Response:
        raise httpx.ConnectError("nobody there")

    server = Server(unreachable, lambda *_: answered(429))
    assert server.open().header(0, 4) == CONTENT[:4]
    assert server.asked == [(0, FIRST)] * 3
    with pytest.raises(CheckpointError, match=r"m\.gguf cannot be fetched \(nobody there\); check the network"):
        Server(*[unreachable] * 3).open()
    with pytest.raises(CheckpointError, match="answers status 503 where bytes 0 to 524287 were asked for"):
        Server(*[lambda *_: answered(503)] * 3).open()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda *_: answered(403), "answers status 403 where bytes 524288 to 1048575 were"),
        (lambda *_: answered(200, CONTENT), "answers status 200 where bytes 524288 to 1048575 were"),
        (
            lambda start, end: range_of(start, end, content_range=""),
            f"Content-Range '' where 'bytes 524288-1048575/{len(CONTENT)}' was expected",
        ),
        (
            lambda start, end: range_of(0, end),
            f"Content-Range 'bytes 0-1048575/{len(CONTENT)}' where 'bytes 524288-1048575/",
        ),
        (
            lambda start, end: range_of(start, end, CONTENT + b"x"),
            f"Content-Range 'bytes 524288-1048575/{len(CONTENT) + 1}' where",
        ),
        (
            lambda start, end: answered(206, CONTENT[start : end - 9], range_of(start, end).headers),
            "524279 bytes where 524288 were asked for",
        ),
        (
            lambda start, end: answered(206, CONTENT[start : end + 1], range_of(start, end).headers),
            "524289 or more bytes where 524288 were asked for",
        ),
        (lambda start, end: range_of(start, end, etag="y"), "ETag 'y', and 'x' before: the file has changed"),
    ],
)
def test_other_bytes_than_were_asked_for(answer: Answer, message: str) -> None:
    file = Server(range_of, answer).open()
    with pytest.raises(CheckpointError) as caught:
        file.header(0, FIRST + 1)
    assert message in str(caught.value)
    assert str(NAME) in str(caught.value)
    assert "download it and give its path" in str(caught.value)


def test_a_server_without_ranges_is_told_apart() -> None:
    with pytest.raises(NoRangesError):
        Server(lambda *_: answered(200, CONTENT)).open()


def test_a_header_without_an_end_is_refused() -> None:
    size = 1 << 40
    file = Server(lambda start, end: range_of(start, end, content_range=f"bytes 0-524287/{size}")).open()
    with pytest.raises(
        CorruptCheckpointError, match=f"its header has {MAX_BYTES + 1} bytes or more.*at most {MAX_BYTES}"
    ):
        file.header(0, MAX_BYTES + 1)
    with pytest.raises(CorruptCheckpointError, match=r"tensor 'a' has .* named by its path"):
        file.read(0, MAX_BYTES + 1, "tensor 'a'")
