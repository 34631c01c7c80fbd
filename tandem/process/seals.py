"""Seals records in storage that others can write: without the key, no record can be forged, changed or prolonged.

A seal is a message authentication code. It does not prove that a record is the latest; the process that the record
names must still authenticate when called.
"""

import hashlib
import hmac

from tandem.core.errors import InvalidRequestError
from tandem.rpc.credentials import Credentials

_PURPOSE = "record seal"
_SEAL_BYTES = 32


class RecordSealer:
    """Seals and verifies records of one kind, such as "worker"; records of another kind are refused."""

    def __init__(self, credentials: Credentials, kind: str) -> None:
        self._key = credentials.key(_PURPOSE)
        self._kind = kind.encode()

    def seal(self, key: bytes, until_ms: int, content: bytes) -> bytes:
        """Returns the stored form of a record: "<until_ms>|<seal in hexadecimal>|<content>".

        Args:
            key: key under which it is stored.
            until_ms: expiry in milliseconds, by the clock of the storage.
        """
        return b"%d|%s|%s" % (until_ms, self._mac(key, until_ms, content), content)

    def opened(self, key: bytes, sealed: bytes) -> bytes:
        """Verifies a record stored under `key` and returns its content.

        Raises:
            InvalidRequestError: it has no seal, or one of another key, kind, secret, expiry or content.
        """
        until, _, rest = sealed.partition(b"|")
        seal, _, content = rest.partition(b"|")
        if not until.isdigit() or len(until) > 18 or not hmac.compare_digest(seal, self._mac(key, int(until), content)):
            raise InvalidRequestError(f"a record under {key[:80]!r} is not sealed with this cluster's secret")
        return content

    def _mac(self, key: bytes, until_ms: int, content: bytes) -> bytes:
        mac = hashlib.blake2b(key=self._key, digest_size=_SEAL_BYTES)
        for field in (self._kind, key, b"%d" % until_ms, content):
            mac.update(len(field).to_bytes(4, "big") + field)
        return mac.hexdigest().encode()
