"""`make image-digests`: asks registries for the digests of the images that ours are built from and run beside.

Writes docker/base-images.env, for `docker compose --env-file` and the build argument BASE_IMAGE. A digest is written
only if the manifest that the registry sent has it.
"""

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tandem.core.addresses import is_loopback
from tools.supply.pins import ROOT

IMAGES: Mapping[str, str] = {"BASE_IMAGE": "python:3.11-slim-bookworm", "REDIS_IMAGE": "redis:7-alpine"}
TARGET = ROOT / "docker" / "base-images.env"
_HUB = "registry-1.docker.io"
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 30.0


class DigestError(RuntimeError):
    """An image's digest could not be learned; the message names the image and the remedy."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An image's name, taken apart: `python:3.11` is library/python of Docker Hub at the tag 3.11."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def parse(cls, name: str) -> "Reference":
        registry, has_registry, rest = name.partition("/")
        if not has_registry or not (":" in registry or "." in registry or registry == "localhost"):
            registry, rest = _HUB, name if has_registry else f"library/{name}"
        repository, _, tag = rest.partition(":")
        return cls(registry, repository, tag or "latest")

    @property
    def url(self) -> str:
        """Of its manifest; registries on this machine are asked without TLS."""
        scheme = "http" if is_loopback(self.registry.partition(":")[0]) else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}/manifests/{self.tag}"


def resolve(name: str, client: httpx.Client) -> str:
    """`name@sha256:…`, of the manifest (of all platforms, where there are several) that the tag names now.

    Raises:
        DigestError: the registry cannot be reached, refuses, or sent something else than it says.
    """
    try:
        response = _manifest(Reference.parse(name).url, client)
    except httpx.HTTPError as error:
        raise DigestError(
            f"{name}: its registry did not tell a digest ({error}); run this where the registry can be reached"
        ) from error
    digest = f"sha256:{hashlib.sha256(response.content).hexdigest()}"
    told = response.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise DigestError(f"{name}: the registry says {told}, the manifest that it sent has {digest}; ask it again")
    return f"{name}@{digest}"


def _manifest(url: str, client: httpx.Client) -> httpx.Response:
    headers = {"Accept": _MANIFESTS}
    response = client.get(url, headers=headers)
    challenge = dict(_CHALLENGE.findall(response.headers.get("WWW-Authenticate", "")))
    if response.status_code == httpx.codes.UNAUTHORIZED and "realm" in challenge:
        asked = {key: value for key, value in challenge.items() if key in ("service", "scope")}
        token = client.get(challenge["realm"], params=asked).raise_for_status().json()
        headers["Authorization"] = f"Bearer {token.get('token') or token.get('access_token')}"
        response = client.get(url, headers=headers)
    return response.raise_for_status()


def write_digests(images: Mapping[str, str], target: Path) -> None:
    """Write `NAME=image@digest` for each of `images`, or nothing at all.

    Raises:
        DigestError: one of them could not be learned.
    """
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
        lines = [f"{variable}={resolve(name, client)}" for variable, name in images.items()]
    target.write_text("\n".join(("# Written by `make image-digests`.", *lines, "")))


def main() -> int:
    """Returns the exit code."""
    try:
        write_digests(IMAGES, TARGET)
    except DigestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(TARGET.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
