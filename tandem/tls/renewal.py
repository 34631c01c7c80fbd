"""Certificates of one run of `tandem up`: created here, and renewed before they expire.

Invariant: every directory trusts the next authority before that signs anything. A process that has read the new files
and one that still has the old ones accept each other, so processes may reread their files in any order.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from tandem.tls.authority import VALID_FOR, Authority
from tandem.tls.identity import CertifiedRole

CHECK_INTERVAL_S = 3600.0  # longest time between two checks
_logger = logging.getLogger(__name__)


class RenewedCertificates:
    """A directory of certificates for each role, below `directory` and named after it.

    Each renewal replaces the signing authority by one that was created a third of a lifetime before, so a certificate
    in use has at least a third of its lifetime left.

    Args:
        deployment: name of the deployment in the certificates.
        valid_for: lifetime of a certificate and of its authority.
        now_s: seconds since 1970.
    """

    def __init__(
        self,
        directory: Path,
        deployment: str,
        valid_for: timedelta = VALID_FOR,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self._deployment, self._valid_for, self._now_s = deployment, valid_for, now_s
        self._signing, self._next = self._new_authority(), self._new_authority()
        self._renewed_at_s = now_s()
        self._write([self._signing, self._next])

    async def run(self) -> None:
        """Renews the certificates whenever a third of their lifetime has passed, until cancelled."""
        third_s = self._valid_for.total_seconds() / 3
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S, third_s))
            if self._now_s() < self._renewed_at_s + third_s:
                continue
            try:
                await asyncio.to_thread(self.renew)
            except OSError as error:
                _logger.error("the certificates in %s are renewed later: %s", self.directory, error)

    def renew(self) -> None:
        """Replaces all certificates, now signed by the next authority. The former one stays trusted until the next
        renewal.

        Raises:
            OSError: a file cannot be written; then it may be called again.
        """
        signing, following = self._next, self._new_authority()
        self._write([signing, following, self._signing])
        self._signing, self._next, self._renewed_at_s = signing, following, self._now_s()
        _logger.info("the certificates in %s were renewed", self.directory)

    def _new_authority(self) -> Authority:
        return Authority(self._deployment, self._valid_for)

    def _write(self, trusted: Sequence[Authority]) -> None:
        """Writes the certificates of all roles, signed by the first of the trusted authorities."""
        ca = b"".join(each.certificate for each in trusted)
        for role in CertifiedRole:
            trusted[0].write(self.directory / role, role, ca=ca)
