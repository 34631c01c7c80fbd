"""Digests of base images, from a registry on loopback that speaks the distribution API."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.supply.image_digests import DigestError, Reference, write_digests

MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """Wants an anonymous token, as Docker Hub does; `liar` has a manifest of another digest than it says."""

    def do_GET(self) -> None:
        address = f"http://{self.headers['Host']}"
        if self.path.startswith("/token?"):
            assert "scope=repository%3Asome%2F" in self.path
            self._send(200, b'{"token": "abc"}')
        elif self.headers.get("Authorization") != "Bearer abc":
            repository = self.path.split("/")[3]
            challenge = f'Bearer realm="{address}/token",service="here",scope="repository:some/{repository}:pull"'
            self._send(401, b"{}", **{"WWW-Authenticate": challenge})
        elif "/missing/" in self.path:
            self._send(404, b"{}")
        else:
            assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
            told = f"sha256:{'0' * 64}" if "/liar/" in self.path else DIGEST
            self._send(200, MANIFEST, **{"Docker-Content-Digest": told})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_images_are_written_by_digest(registry: str, tmp_path: Path) -> None:
    target = tmp_path / "base-images.env"
    write_digests({"BASE_IMAGE": f"{registry}/some/python:3.11"}, target)
    assert f"\nBASE_IMAGE={registry}/some/python:3.11@{DIGEST}\n" in target.read_text()


@pytest.mark.parametrize(("name", "said"), [("liar", "the registry says sha256:000"), ("missing", "404")])
def test_what_is_not_known_is_not_written(registry: str, tmp_path: Path, name: str, said: str) -> None:
    target = tmp_path / "base-images.env"
    images = {"BASE_IMAGE": f"{registry}/some/python:3.11", "REDIS_IMAGE": f"{registry}/some/{name}:7"}
    with pytest.raises(DigestError, match=rf"some/{name}:7: .*{said}"):
        write_digests(images, target)
    assert not target.exists()


def test_without_a_registry_the_remedy_is_said(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="run this where the registry can be reached"):
        write_digests({"BASE_IMAGE": "localhost:1/some/python:3.11"}, tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("python:3.11-slim-bookworm", "https://registry-1.docker.io/v2/library/python/manifests/3.11-slim-bookworm"),
        ("someone/thing", "https://registry-1.docker.io/v2/someone/thing/manifests/latest"),
        ("ghcr.io/a/b/c:1", "https://ghcr.io/v2/a/b/c/manifests/1"),
        ("localhost:5000/a:1", "http://localhost:5000/v2/a/manifests/1"),
    ],
)
def test_names_are_read_as_docker_reads_them(name: str, url: str) -> None:
    assert Reference.parse(name).url == url
