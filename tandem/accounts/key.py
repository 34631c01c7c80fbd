"""API keys: a secret that is shown once, and the stored record. Immutable; a key only changes by being revoked.

A secret has 32 random bytes and cannot be guessed from its digest, so one SHA-256 suffices; slow password hashes would
cost as much as serving a request. Digests are compared in constant time.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, fields, replace
from typing import Any

from tandem.core.errors import InvalidRequestError, shown
from tandem.core.known_fields import known_fields

PREFIX = "sk-tandem-"
MAX_PER_MINUTE = 10**9  # of each rate limit
MAX_CONCURRENCY = 10**6
MAX_NAME_CHARACTERS = 128
MAX_MODELS = 64  # that a key may name
_SECRET = re.compile(rf"{PREFIX}([0-9a-f]{{12}})-[A-Za-z0-9_-]{{43}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of a key; None: not limited. `concurrency`: requests that run at once; `budget_nanos`: total cost of all
    its requests, in billionths of a unit of currency.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrency: int | None = None
    budget_nanos: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = MAX_CONCURRENCY if field.name == "concurrency" else MAX_PER_MINUTE
            if field.name != "budget_nanos" and value is not None and not 1 <= value <= most:
                raise InvalidRequestError(f"{field.name}={shown(value)} must be from 1 to {most}; omit it for no limit")

    @property
    def rates(self) -> tuple[int | None, int | None, int | None]:
        """The limits per minute on requests, input tokens and output tokens."""
        return self.requests_per_minute, self.input_tokens_per_minute, self.output_tokens_per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountKey:
    """The stored record of a key, without its secret.

    Args:
        digest: of the secret.
        tenant: owner of the caches, history and stored answers that the key may see.
        models: allowed models; empty: all.
        cache_group: keys of one group read each other's caches, whatever their tenants.
    """

    key_id: str
    digest: str
    name: str
    tenant: str
    limits: KeyLimits = KeyLimits()
    models: tuple[str, ...] = ()
    cache_group: str | None = None
    is_admin: bool = False
    created_s: int = 0
    revoked_s: int | None = None

    def __post_init__(self) -> None:
        for field in ("name", "tenant", "cache_group"):
            value = getattr(self, field)
            if value is not None and not is_name(value):
                raise InvalidRequestError(
                    f"{field}={shown(value)} must be 1 to {MAX_NAME_CHARACTERS} printable characters"
                )
        if len(self.models) > MAX_MODELS or not all(map(is_name, self.models)):
            raise InvalidRequestError(f"models={shown(self.models)} must be at most {MAX_MODELS} names")

    @property
    def is_live(self) -> bool:
        """Whether the key has not been revoked."""
        return self.revoked_s is None

    def allows(self, model: str) -> bool:
        """Whether the key may use this model."""
        return not self.models or model in self.models

    def matches(self, secret: str) -> bool:
        """Whether this is the key's secret; the comparison takes constant time."""
        return hmac.compare_digest(self.digest, digest_of(secret))

    def revoked(self, now_s: int) -> "AccountKey":
        return replace(self, revoked_s=now_s)

    def as_json(self) -> dict[str, Any]:
        """All fields except the digest."""
        limits = {field.name: getattr(self.limits, field.name) for field in fields(self.limits)}
        names = ("key_id", "name", "tenant", "cache_group", "is_admin", "created_s", "revoked_s")
        return {**{name: getattr(self, name) for name in names}, "models": list(self.models), "limits": limits}

    @classmethod
    def from_json(cls, value: dict[str, Any], digest: str) -> "AccountKey":
        """Inverse of `as_json`; raises KeyError or TypeError for anything else."""
        limits = KeyLimits(**known_fields(KeyLimits, value["limits"]))
        own = {**known_fields(cls, value), "models": tuple(value["models"]), "limits": limits}
        return cls(**own, digest=digest)


def new_key(name: str, created_s: int, tenant: str | None = None, **more: Any) -> tuple[AccountKey, str]:
    """Creates a key and its secret, which is not stored. Without `tenant`, the key is its own tenant.

    Raises:
        InvalidRequestError: naming the invalid field.
    """
    key_id = secrets.token_hex(6)
    secret = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    own = key_id if tenant is None else tenant
    key = AccountKey(key_id=key_id, digest=digest_of(secret), name=name, tenant=own, created_s=created_s, **more)
    return key, secret


def key_id_of(secret: str) -> str | None:
    """The key id that a secret contains; None where it does not have the form of a secret."""
    found = _SECRET.fullmatch(secret)
    return None if found is None else found.group(1)


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, hexadecimal; stores keep it in place of the secret."""
    return hashlib.sha256(b"tandem-api-key-1:" + secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_name(value: object) -> bool:
    """Whether a value can be the name of a key, tenant or group."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS and value.isprintable()
