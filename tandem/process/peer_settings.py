"""Settings of authentication and encryption between the processes of a deployment."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from tandem.core.addresses import is_loopback
from tandem.core.errors import ConfigurationError
from tandem.process.settings import Settings
from tandem.rpc.credentials import Credentials, ProcessRole, certified_role
from tandem.tls.files import CA, CERTIFICATE, KEY, TlsFiles

_logger = logging.getLogger(__name__)


class PeerSettings(Settings):
    """Base of the settings of every process that calls others or is called by them."""

    tls_dir: Path | None = Field(
        None,
        description=f"directory of {CERTIFICATE}, {KEY} and {CA} for TLS between all processes, reread when they "
        "change; omitted: plain text, which needs --insecure beyond loopback",
    )
    insecure: bool = Field(False, description="allow calls and KV blocks in plain text beyond loopback")

    def credentials(
        self, secret: bytes, role: ProcessRole, addresses: Iterable[str], *, address: str = "", incarnation: str = ""
    ) -> Credentials:
        """Returns the credentials of this process.

        Args:
            secret: the cluster's secret.
            addresses: host:port on which it listens, and of the processes that it is configured to call.
            address: host:port under which others call it.
            incarnation: "" = a new one.

        Raises:
            ConfigurationError: the certificate is of no use, or plain text would leave this machine unasked.
        """
        tls = self._open_tls(role, [each for each in addresses if not is_loopback(each.rpartition(":")[0])])
        found = Credentials(secret, role, address=address, tls=tls, is_insecure=self.insecure)
        return replace(found, incarnation=incarnation) if incarnation else found

    def _open_tls(self, role: ProcessRole, distant: list[str]) -> TlsFiles | None:
        """Opens the certificate files, or checks that plain text is allowed. `distant`: addresses of other machines."""
        if self.tls_dir is not None:
            if self.insecure:
                raise ConfigurationError("--tls-dir and --insecure exclude each other; leave one out")
            return TlsFiles(self.tls_dir, certified_role(role))
        if not distant:
            return None
        if not self.insecure:
            raise ConfigurationError(
                f"{distant[0]} is beyond this machine, where processes need TLS: set --tls-dir (TANDEM_TLS_DIR, a "
                f"directory of {CERTIFICATE}, {KEY} and {CA} for a {certified_role(role)}), or --insecure "
                "(TANDEM_INSECURE=true) on a network where everybody may read prompts, answers and KV blocks"
            )
        _logger.warning(
            "insecure: hosts on the path to or from %s can read and change prompts, answers and KV blocks; --tls-dir "
            "encrypts them",
            ", ".join(distant),
        )
        return None
