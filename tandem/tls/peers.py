"""Rechecks the certificate of a peer on an open connection: whether this process's current files still accept it."""

import ssl
import time
from collections.abc import Callable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from tandem.tls.files import Material, TlsFiles


class PeerCertificate:
    """Certificates of a peer, which its handshake has verified; they can be checked again later.

    NOTE: only signatures and the end are looked at again. Usages and names were verified by the handshake, and stay.

    Args:
        tls: the files of this process.
        chain: that of the other side, its own first.
        now_s: seconds since 1970.
    """

    def __init__(
        self, tls: TlsFiles, chain: Sequence[x509.Certificate], now_s: Callable[[], float] = time.time
    ) -> None:
        self._tls, self._chain, self._now_s = tls, chain, now_s
        self._end_s = chain[0].not_valid_after_utc.timestamp()
        self._material: Material | None = None
        self._is_signed = False

    def is_accepted(self) -> bool:
        """Whether an authority in `ca.crt` signed the certificate and it has not expired. Costs three `stat` calls."""
        material = self._tls.current()
        if material is not self._material:
            self._is_signed = is_signed(self._chain, x509.load_pem_x509_certificates(material.ca))
            self._material = material
        return self._is_signed and self._now_s() <= self._end_s


def is_signed(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> bool:
    """Whether signatures lead from the first certificate of `chain` to one of `authorities`."""
    link: x509.Certificate | None = chain[0]
    for _ in chain:
        if link is None:
            return False
        if link in authorities or any(_has_issued(authority, link) for authority in authorities):
            return True
        link = next((each for each in chain[1:] if each != link and _has_issued(each, link)), None)
    return False


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # NOTE: another name; a key of another kind; another key
        return False
    return True


def chain_of(connection: ssl.SSLSocket) -> list[x509.Certificate]:
    """The certificates that the peer has sent, its own first. NOTE: Python has a public function only from 3.13 on."""
    sent = connection._sslobj.get_unverified_chain()  # type: ignore[attr-defined]
    return [x509.load_pem_x509_certificate(each.public_bytes().encode()) for each in sent]
