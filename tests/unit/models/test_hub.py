"""Names and paths of models, without a network."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from tandem.core.errors import CheckpointError
from tandem.models.hub import resolve_model_path, served_name


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_path_that_is_no_directory(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve_model_path(name)


def test_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is not a directory or a GGUF file"):
        resolve_model_path(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["not a name", "", "--", "a..b"])
def test_impossible_name(name: str) -> None:
    with pytest.raises(CheckpointError):
        resolve_model_path(name)


def test_without_network_or_cache_the_message_says_what_to_do(tmp_path: Path) -> None:
    """A process of its own: the hub's client reads its environment when it is imported."""
    code = "from tandem.models.hub import resolve_model_path; resolve_model_path('someone/some-model')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "CheckpointError: 'someone/some-model' is no directory here" in done.stderr
    assert "check the name and the network" in done.stderr


NAMES = ("config.json", "tokenizer.json", "model.safetensors", "README.md", "additional_chat_templates/rag.jinja")
UNREAD = ("original/params.json", "assets/notes.txt", "onnx/config.json")


@contextmanager
def small_hub() -> Iterator[tuple[str, list[str]]]:
    """(URL, paths asked for) of a hub on loopback: one repository that any name and revision finds."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            files = [{"type": "file", "path": name, "size": 2, "oid": "e" * 40} for name in (*NAMES, *UNREAD)]
            repository = {"id": "a/b", "sha": "c" * 40, "siblings": [{"rfilename": name} for name in (*NAMES, *UNREAD)]}
            is_api, is_tree = self.path.startswith("/api/"), "/tree/" in self.path
            body = json.dumps(files if is_tree else repository if is_api else {}).encode()
            self.send_response(200)
            for name, value in (("Content-Length", str(len(body))), ("ETag", "e" * 40), ("X-Repo-Commit", "c" * 40)):
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("revision", "options", "has_weights"), [("v1.0", "", True), ("refs/pr/1", ", has_weights=False", False)]
)
def test_a_revision_is_kept_to_and_weights_are_left_where_nobody_wants_them(
    tmp_path: Path, revision: str, options: str, has_weights: bool
) -> None:
    """Regression: the slashes of a revision were counted as the name's, which has one at most."""
    code = f"from tandem.models.hub import resolve_model_path; print(resolve_model_path('a/b@{revision}'{options}))"
    with small_hub() as (url, asked):
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip())
    fetched = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if not path.is_dir()}
    unwanted = {"README.md"} if has_weights else {"README.md", "model.safetensors"}
    assert fetched == set(NAMES) - unwanted
    assert any(f"/revision/{quote(revision, safe='')}" in path for path in asked)
    assert not any("/revision/main" in path for path in asked)


def test_a_model_is_called_after_its_directory_or_its_name_on_the_hub(tmp_path: Path) -> None:
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/name@v1") == served_name("org/name") == "org/name"
