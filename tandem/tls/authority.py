"""A certificate authority created for one run: its key is never written, and is lost with the object."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.tls.files import CA, CERTIFICATE, KEY
from tandem.tls.identity import CertifiedRole, dns_name

VALID_FOR = timedelta(days=365)  # default lifetime of a certificate and of its authority
_CLOCK_SKEW = timedelta(minutes=5)


class Authority:
    """Signs certificates (ECDSA P-256) for the processes of one deployment."""

    def __init__(self, deployment: str, valid_for: timedelta = VALID_FOR) -> None:
        self._deployment = deployment
        self._begin = datetime.now(UTC) - _CLOCK_SKEW
        self._end = datetime.now(UTC) + valid_for
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tandem {deployment}"[:64])])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            self._builder(name, name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, in PEM."""
        return self._certificate.public_bytes(Encoding.PEM)

    def write(self, directory: Path, role: CertifiedRole, *, ca: bytes = b"") -> None:
        """Writes the files that `TlsFiles` reads, for a process of this role; only this user may read the key.

        Args:
            directory: created if missing.
            ca: certificates to trust, in PEM; empty = of this authority only.
        """
        self.write_named(directory, dns_name(role, self._deployment), ca=ca)

    def write_named(self, directory: Path, name: str, *, ca: bytes = b"") -> None:
        """Like `write`, for a server that clients reach by this DNS name."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        # NOTE: tells apart authorities of one name, of which both are trusted while one replaces the other
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(x509.Name([]), self._certificate.subject, key.public_key())
            .add_extension(names, critical=True)
            .add_extension(usages, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        replace_file(directory / CA, ca or self.certificate)
        replace_file(directory / KEY, private)
        replace_file(directory / CERTIFICATE, certificate.public_bytes(Encoding.PEM))

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
        )


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that only this user may read; by renaming, so that readers find the old file or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
