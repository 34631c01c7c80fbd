"""Makes what a control plane proves itself with: a CA, a serving certificate, and the key that signs pods' tokens.

Everything is made anew by the `openssl` command for one control plane and ends with its folder.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    ca: Path
    serving: Path
    serving_key: Path
    tokens_key: Path


def make_certificates(folder: Path, names: list[str], addresses: list[str]) -> Certificates:
    """Write a CA and what it signs into `folder`. Raises RuntimeError when openssl is missing or refuses."""
    folder.mkdir(parents=True)
    made = Certificates(*(folder / name for name in ("ca.crt", "serving.crt", "serving.key", "tokens.key")))
    ca_key, request, extensions = folder / "ca.key", folder / "serving.csr", folder / "serving.ext"
    alternatives = [f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses]
    extensions.write_text(f"subjectAltName={','.join(alternatives)}\nextendedKeyUsage=serverAuth\n")
    key: list[str | Path] = ["-newkey", "rsa:2048", "-nodes"]
    _openssl("req", "-x509", *key, "-keyout", ca_key, "-out", made.ca, "-subj", "/CN=tandem-test-ca", "-days", "30")
    _openssl("req", *key, "-keyout", made.serving_key, "-out", request, "-subj", "/CN=kube-apiserver")
    signed_by: list[str | Path] = [
        "-CA",
        made.ca,
        "-CAkey",
        ca_key,
        "-CAcreateserial",
        "-days",
        "30",
        "-extfile",
        extensions,
    ]
    _openssl("x509", "-req", "-in", request, "-out", made.serving, *signed_by)
    _openssl("genrsa", "-out", made.tokens_key, "2048")
    return made


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *(str(argument) for argument in arguments)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("openssl is missing; install it with the system's package manager") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"openssl {command[1]} failed: {error.stderr.strip()}") from error
