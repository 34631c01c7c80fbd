"""Certificate, key and trusted CAs of a process, read from a directory and reread when they change.

Invariant: the last valid content is in use. Damaged or partly replaced files change nothing.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tandem.core.errors import ConfigurationError
from tandem.tls.contexts import check_by_handshake, client_context, server_context
from tandem.tls.identity import CertifiedName, CertifiedRole, certified_name, dns_name

CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"  # NOTE: as cert-manager and Secrets of type kubernetes.io/tls
_NUM_TRIES = 3

_Version = tuple[tuple[int, int, int], ...]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Content of the files: PEM texts for gRPC, contexts for sockets."""

    name: CertifiedName
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    server: ssl.SSLContext = field(repr=False)
    client: ssl.SSLContext = field(repr=False)

    def peer_name(self, role: CertifiedRole) -> str:
        """The DNS name in the certificate of a process of this deployment and role."""
        return dns_name(role, self.name.deployment)


class TlsFiles:
    """The certificate directory of one process. Thread-safe.

    Args:
        directory: contains `tls.crt` (with intermediates, if any), `tls.key` and `ca.crt` (one or more CAs).
        role: the role that the certificate must have.
        now_s: seconds since 1970.

    Raises:
        ConfigurationError: a file is missing or unusable; names it and the remedy.
    """

    def __init__(self, directory: Path, role: CertifiedRole, now_s: Callable[[], float] = time.time) -> None:
        self._directory, self._role, self._now_s = directory, role, now_s
        self._lock = threading.Lock()
        self._complaint = ""  # what was logged of files that are of no use
        self._version, self._material = self._read()

    def current(self) -> Material:
        """The current content of the files; the same object while they are unchanged."""
        with self._lock:
            try:
                if self._stat() != self._version:
                    self._version, self._material = self._read()
                    self._complaint = ""
                    _logger.info("new certificates of %s are in use", self._directory)
            except ConfigurationError as error:
                if self._complaint != str(error):
                    _logger.warning("the certificates read before stay in use: %s", error)
                self._complaint = str(error)
            return self._material

    def _read(self) -> tuple[_Version, Material]:
        """NOTE: files may be replaced while they are read; then they are read again."""
        for is_last in (*(False,) * (_NUM_TRIES - 1), True):
            version = self._stat()
            try:
                material = self._load()
            except ConfigurationError:
                if is_last or self._stat() == version:
                    raise
                continue
            if self._stat() == version:
                break
        return version, material

    def _stat(self) -> _Version:
        found = []
        for name in (CERTIFICATE, KEY, CA):
            try:
                stat = (self._directory / name).stat()
            except OSError as error:
                raise self._missing(name, error) from error
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def _load(self) -> Material:
        certificate, key, ca = self._bytes(CERTIFICATE), self._bytes(KEY), self._bytes(CA)
        leaf = self._certificates(CERTIFICATE, certificate)[0]
        # NOTE: without what a file may have beside certificates, such as comments, which `ssl` reads as ASCII
        authorities = b"".join(each.public_bytes(Encoding.DER) for each in self._certificates(CA, ca))
        self._check_key(leaf, key)
        self._check_dates(leaf)
        name = self._name(leaf)
        paths = self._directory / CERTIFICATE, self._directory / KEY
        try:
            server, client = server_context(*paths, authorities), client_context(*paths, authorities)
            check_by_handshake(server, client, str(name))
        except (OSError, ConfigurationError) as error:  # NOTE: an SSLError is an OSError
            raise ConfigurationError(
                f"{paths[0]} cannot be used: {error}; it must be signed by a CA in {CA}, for server and client "
                "authentication"
            ) from error
        return Material(name, certificate, key, ca, server, client)

    def _bytes(self, name: str) -> bytes:
        try:
            return (self._directory / name).read_bytes()
        except OSError as error:
            raise self._missing(name, error) from error

    def _missing(self, name: str, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{self._directory / name} cannot be read ({error.strerror}): tls_dir needs {CERTIFICATE}, {KEY} and {CA}, "
            "readable by this process"
        )

    def _certificates(self, name: str, data: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(data)
        except ValueError as error:
            raise ConfigurationError(f"{self._directory / name} has no certificates in PEM form: {error}") from error

    def _check_key(self, leaf: x509.Certificate, data: bytes) -> None:
        path = self._directory / KEY
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{path} is no private key in PEM form without a password: {error}") from error
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
            raise ConfigurationError(
                f"{path} does not belong to {CERTIFICATE}, whose first certificate must be this process's own"
            )

    def _check_dates(self, leaf: x509.Certificate) -> None:
        first, last = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not first.timestamp() <= self._now_s() <= last.timestamp():
            raise ConfigurationError(
                f"{self._directory / CERTIFICATE} is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, "
                "which is not now; renew it, or set this machine's clock"
            )

    def _name(self, leaf: x509.Certificate) -> CertifiedName:
        """The identity in the certificate; raises if it is not this process's."""
        try:
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            dns_names = names.get_values_for_type(x509.DNSName)
        except x509.ExtensionNotFound:
            dns_names = []
        name, wanted = certified_name(dns_names), dns_name(self._role, "DEPLOYMENT")
        path = self._directory / CERTIFICATE
        if name is None:
            raise ConfigurationError(
                f"{path} names no process of Tandem: its DNS names are {', '.join(dns_names) or 'none'}; one must be "
                f"{wanted}"
            )
        if name.role != self._role:
            raise ConfigurationError(
                f"{path} is for a {name.role} ({name}), this is a {self._role}: {wanted} is needed"
            )
        return name
