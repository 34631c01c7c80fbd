"""GGUF file on an HTTP server, of which only the header and small tensors are fetched, by range requests.

Fetched bytes stay in memory until the file is closed; nothing is written to disk.
"""

import logging
import re
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CheckpointError, CorruptCheckpointError

MAX_BYTES = 64 << 20
"""Of a header, and of a tensor. The largest vocabularies make headers of about 10 MB."""
_FIRST_BYTES = 1 << 19
_OK, _PARTIAL, _TOO_MANY, _ERROR = 200, 206, 429, 500
_WAITS_S = (0.5, 1.0, 2.0, 4.0)  # pauses before further attempts
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

_log = logging.getLogger(__name__)


class NoRangesError(Exception):
    """The server ignores range requests and sends whole files."""


class RangedFile:
    """A `GgufSource` over HTTP; methods are described there. When more of the header is needed, the number of fetched
    bytes doubles.

    Args:
        name: for messages.
        client: HTTP client, which is closed with the file.

    Raises:
        CheckpointError: the server refuses, cannot be reached, or answers with other bytes than were requested.
        NoRangesError: the server does not support ranges.
    """

    remedy = "name another file or revision, or tell its publisher"

    def __init__(self, name: Path, url: str, client: httpx.Client) -> None:
        self._name, self._url, self._client = name, url, client
        self._num_bytes: int | None = None
        self._etag: str | None = None
        self._num_fetched = self._num_ranges = 0
        with ExitStack() as opened:
            opened.callback(client.close)
            self._head = self._fetch(0, _FIRST_BYTES)
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        assert self._num_bytes is not None
        return self._num_bytes

    def header(self, start: int, end: int) -> bytes:
        self._require_bound(end, "its header")
        if end > len(self._head):
            self._head += self._fetch(len(self._head), min(max(end, 2 * len(self._head)), MAX_BYTES))
        return self._head[start:end]

    def read(self, start: int, num_bytes: int, noun: str) -> NDArray[np.uint8]:
        self._require_bound(num_bytes, noun)
        end = start + num_bytes
        return np.frombuffer(self._head[start:end] if end <= len(self._head) else self._fetch(start, end), np.uint8)

    def close(self) -> None:
        self._opened.close()
        _log.info(
            "fetched %d of the %d bytes of %s, in %d ranges",
            *(self._num_fetched, len(self), self._name, self._num_ranges),
        )

    def _require_bound(self, num_bytes: int, noun: str) -> None:
        if num_bytes > MAX_BYTES:
            raise CorruptCheckpointError(
                f"{self._name}: {noun} has {num_bytes} bytes or more, and without the rest of the file at most "
                f"{MAX_BYTES} are fetched: it is damaged, or must be downloaded whole and named by its path"
            )

    def _fetch(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end - 1`, or fewer at the file's end. Tries several times."""
        for wait_s in (*_WAITS_S, None):
            try:
                with self._client.stream("GET", self._url, headers={"Range": f"bytes={start}-{end - 1}"}) as response:
                    if wait_s is None or not _is_passing(response.status_code):
                        return self._read(response, start, end)
                    problem = f"status {response.status_code}"
            except httpx.TransportError as error:
                if wait_s is None:
                    raise CheckpointError(
                        f"{self._name} cannot be fetched ({error}); check the network, or download it and give its path"
                    ) from error
                problem = str(error)
            _log.warning("%s: %s; asks again in %g s", self._name, problem, wait_s)
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, response: httpx.Response, start: int, end: int) -> bytes:
        if response.status_code == _OK and self._num_bytes is None:
            raise NoRangesError(f"{self._name}: the server ignores ranges")
        if response.status_code != _PARTIAL:
            raise CheckpointError(
                f"{self._name}: the server answers status {response.status_code} where bytes {start} to {end - 1} were "
                "asked for; check the name, the network and HF_TOKEN, or download it and give its path"
            )
        told = response.headers.get("Content-Range", "")
        found = _RANGE.fullmatch(told)
        total = int(found[3]) if found else 0
        expected = f"bytes {start}-{min(end, self._num_bytes or total) - 1}/{self._num_bytes or total}"
        if told != expected:
            raise self._wrong(f"Content-Range {told!r} where {expected!r} was expected")
        etag = response.headers.get("ETag")
        if self._num_bytes is not None and etag != self._etag:
            raise self._wrong(f"ETag {etag!r}, and {self._etag!r} before: the file has changed")
        self._num_bytes, self._etag = total, etag
        size, content = min(end, total) - start, bytearray()
        for piece in response.iter_raw():
            content += piece
            if len(content) > size:
                break
        if len(content) != size:
            more = " or more" * (len(content) > size)
            raise self._wrong(f"{len(content)}{more} bytes where {size} were asked for")
        self._num_fetched += size
        self._num_ranges += 1
        return bytes(content)

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: the server answers a range with {problem}; try again without a proxy in between, or "
            "download it and give its path"
        )


def _is_passing(status: int) -> bool:
    return status == _TOO_MANY or status >= _ERROR
