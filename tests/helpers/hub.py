"""A Hugging Face hub on loopback for tests: one repository, which any name finds at any revision."""

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

SMALL_MODEL = (
    *("config.json", "tokenizer.json", "model.safetensors"),
    *("README.md", "additional_chat_templates/rag.jinja"),
)
COMMIT, LATER_COMMIT = "c" * 40, "d" * 40


class Hub:
    """Args:
    names: of the repository's files; each holds an empty JSON object, or what `contents` has of it.
    moves_after_first: its branches and tags hold another commit once they were asked for.
    has_ranges: it answers a range of a file with that range, not with the file.
    """

    def __init__(
        self, names: Sequence[str], contents: Mapping[str, bytes], *, moves_after_first: bool, has_ranges: bool
    ) -> None:
        self.asked: list[str] = []
        self.sent: Counter[str] = Counter()  # bytes of each file's content, by its name without folders
        self.refused = 0  # requests for ranges that are yet to be answered by status 503
        self.url = ""
        self._names = names
        self._contents = contents
        self._moves_after_first = moves_after_first
        self.has_ranges = has_ranges

    @classmethod
    @contextmanager
    def running(
        cls,
        names: Sequence[str],
        contents: Mapping[str, bytes] | None = None,
        *,
        moves_after_first: bool = False,
        has_ranges: bool = True,
    ) -> Iterator["Hub"]:
        hub = cls(names, contents or {}, moves_after_first=moves_after_first, has_ranges=has_ranges)
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that asks this hub and keeps what it fetches in `home`."""
        inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        return inherited | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

    def answer(self, method: str, path: str) -> tuple[str, bytes | None]:
        """(commit, content) of what is at `path`; None = there is no such file."""
        commit = self._commit(path)
        self.asked.append(f"{method} {path}")
        if "/tree/" in path:
            files = [
                {"type": "file", "path": name, "size": 2, "oid": _etag(name.rpartition("/")[2])} for name in self._names
            ]
            return commit, json.dumps(files).encode()
        if path.startswith("/api/"):
            files = [{"rfilename": name} for name in self._names]
            return commit, json.dumps({"id": "a/b", "sha": commit, "siblings": files}).encode()
        is_known = _name(path) in {name.rpartition("/")[2] for name in self._names}
        return commit, self._contents.get(_name(path), b"{}") if is_known else None

    def _commit(self, path: str) -> str:
        """Commit that the revision in `path` is resolved to: itself if it is a commit."""
        for marker in ("/revision/", "/resolve/", "/tree/"):
            revision = unquote(path.partition(marker)[2]).partition("?")[0].partition("/")[0]
            if revision in (COMMIT, LATER_COMMIT):
                return revision
        was_asked = any("/revision/" in asked for asked in self.asked)
        return LATER_COMMIT if self._moves_after_first and was_asked else COMMIT


def _name(path: str) -> str:
    """Of a file, without its folders."""
    return unquote(path.rpartition("/")[2])


def _etag(name: str) -> str:
    """NOTE: files of one tag are one file in the client's cache."""
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            commit, body = hub.answer(self.command, self.path)
            told = {"X-Repo-Commit": commit, "ETag": _etag(_name(self.path))}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            status = 200
            if body is None:
                status, body = 404, b""
                told["X-Error-Code"] = "EntryNotFound"
            elif asked and hub.refused:
                hub.refused -= 1
                status, body = 503, b""
            elif asked and hub.has_ranges:
                start, total = int(asked[1]), len(body)
                body = body[start : int(asked[2]) + 1]
                status, told["Content-Range"] = 206, f"bytes {start}-{start + len(body) - 1}/{total}"
            self.send_response(status)
            for name, value in (told | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                with suppress(OSError):  # NOTE: a client that wants a range does not read a file to its end
                    self.wfile.write(body)
                    hub.sent[_name(self.path)] += len(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler
