"""Encryption of stored responses. A reader of Redis sees sizes, times and ids, but no text."""

import hashlib
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tandem.core.errors import ConfigurationError

MIN_KEY_BYTES = 16
_FORMAT = b"\x01"
_NONCE_BYTES = 12
_KEY_ID_BYTES = 4
_HEADER_BYTES = len(_FORMAT) + _KEY_ID_BYTES + _NONCE_BYTES


class UnsealError(Exception):
    """The bytes were encrypted with none of the keys, for another place, or were altered since."""


class ResponseSealer:
    """AES-256-GCM (NIST SP 800-38D) with random nonces: safe for 2^32 entries a key.

    Sealed: a format byte, 4 bytes of key id, a nonce of 12 bytes, the ciphertext with its tag of 16.

    Args:
        secrets: the first encrypts, all decrypt. Each is hashed to a key, so it may be a secret that is used elsewhere.

    Raises:
        ConfigurationError: there is none, or one is too short.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets:
            raise ConfigurationError("responses_key is empty; leave it out or write at least one key")
        for number, secret in enumerate(secrets, 1):
            if len(secret) < MIN_KEY_BYTES:
                raise ConfigurationError(
                    f"key {number} of responses_key has {len(secret)} bytes; use at least {MIN_KEY_BYTES} random ones"
                )
        keys = [hashlib.blake2b(secret, digest_size=36, person=b"tandem responses").digest() for secret in secrets]
        self._ciphers = {key[:_KEY_ID_BYTES]: AESGCM(key[_KEY_ID_BYTES:]) for key in reversed(keys)}
        self._key_id = keys[0][:_KEY_ID_BYTES]

    def seal(self, text: bytes, place: bytes) -> bytes:
        """Encrypts `text`. `place`: the entry's key in the store; under another key it cannot be decrypted."""
        header = _FORMAT + self._key_id + os.urandom(_NONCE_BYTES)
        return header + self._ciphers[self._key_id].encrypt(header[-_NONCE_BYTES:], text, header + place)

    def unseal(self, sealed: bytes, place: bytes) -> bytes:
        """Decrypts an entry. Raises UnsealError."""
        header = sealed[:_HEADER_BYTES]
        cipher = self._ciphers.get(header[len(_FORMAT) : -_NONCE_BYTES])
        if len(header) < _HEADER_BYTES or header[:1] != _FORMAT or cipher is None:
            raise UnsealError("it was encrypted with none of this gateway's keys")
        try:
            return cipher.decrypt(header[-_NONCE_BYTES:], sealed[_HEADER_BYTES:], header + place)
        except InvalidTag:
            raise UnsealError("it was altered, or belongs to another response") from None
