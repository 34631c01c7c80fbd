"""Seals on records that are kept where others may write: whoever has no key cannot make, change or prolong one.

A seal says nothing of whether a record is the latest. What it names must still prove itself when it is called.
"""

import hashlib
import hmac

from tandem.core.errors import InvalidRequestError
from tandem.rpc.credentials import Credentials

_PURPOSE = "record seal"
_SEAL_BYTES = 32


class RecordSealer:
    """Seals and opens records of one kind, as "worker"; a record of another kind does not open."""

    def __init__(self, credentials: Credentials, kind: str) -> None:
        self._key = credentials.key(_PURPOSE)
        self._kind = kind.encode()

    def seal(self, key: bytes, until_ms: int, content: bytes) -> bytes:
        """A record as it is kept: "<until_ms>|<seal in hexadecimal>|<content>".

        Args:
            key: under which it is kept.
            until_ms: when it ends, milliseconds by the clock of where it is kept.
        """
        return b"%d|%s|%s" % (until_ms, self._mac(key, until_ms, content), content)

    def opened(self, key: bytes, sealed: bytes) -> bytes:
        """The content that was sealed under `key`.

        Raises:
            InvalidRequestError: it has no seal, or one of another key, kind, secret, end or content.
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
