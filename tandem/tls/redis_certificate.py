"""Creates the certificate of docker compose's Redis: `python -m tandem.tls.redis_certificate NAME SERVER CLIENTS`.

NAME: DNS name by which clients call the server. SERVER: directory of `tls.crt`, `tls.key` and `ca.crt`, for the server
alone. CLIENTS: directory of `ca.crt` alone, for clients. Existing files stay unless the certificate has expired.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from tandem.tls.authority import Authority, replace_file
from tandem.tls.files import CA, CERTIFICATE, KEY
from tandem.tls.peers import is_signed

VALID_FOR = timedelta(days=3650)  # NOTE: redis-server reads it at its start alone, and nothing restarts it for another
_FOR_ALL = 0o644  # NOTE: the server is another user, and nobody else is given the directory


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tls.redis_certificate", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("server", type=Path)
    parser.add_argument("clients", type=Path)
    options = parser.parse_args(argv)
    try:
        create_certificate(options.name, options.server, options.clients)
    except OSError as error:
        sys.stderr.write(f"no certificate can be kept in {options.server} and {options.clients}: {error}\n")
        return 1
    return 0


def create_certificate(name: str, server: Path, clients: Path, now_s: Callable[[], float] = time.time) -> None:
    """Creates a certificate if there is none or it has expired. Its authority's key is not stored.

    Raises:
        OSError: a file cannot be read or written.
    """
    if not _is_usable(server, now_s()):
        Authority("redis", VALID_FOR).write_named(server, name)
        for each in (CA, KEY, CERTIFICATE):
            (server / each).chmod(_FOR_ALL)
    clients.mkdir(parents=True, exist_ok=True)
    replace_file(clients / CA, (server / CA).read_bytes())
    (clients / CA).chmod(_FOR_ALL)


def _is_usable(server: Path, now_s: float) -> bool:
    try:
        (certificate,) = x509.load_pem_x509_certificates((server / CERTIFICATE).read_bytes())
        authorities = x509.load_pem_x509_certificates((server / CA).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return is_signed([certificate], authorities) and now_s < certificate.not_valid_after_utc.timestamp()


if __name__ == "__main__":
    sys.exit(main())
