"""API keys: a secret that is shown once, and what is known of it. Immutable; a key changes only by being revoked.

A secret has 32 random bytes, so nobody can guess one from its digest, and one SHA-256 is as good as a slow hash; slow
hashes are for passwords, and would cost each request what serving it costs. Digests are compared in constant time.
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
MAX_PER_MINUTE = 10**9
MAX_CONCURRENCY = 10**6
MAX_NAME_CHARACTERS = 128
MAX_MODELS = 64
_SECRET = re.compile(rf"{PREFIX}([0-9a-f]{{12}})-[A-Za-z0-9_-]{{43}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """None: not limited. `budget_nanos`: what all its requests may cost together."""

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
        return self.requests_per_minute, self.input_tokens_per_minute, self.output_tokens_per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountKey:
    """What is kept of a key; never its secret.

    Args:
        digest: of the secret.
        tenant: whose caches, history and stored answers it sees.
        models: those it may use; empty: all.
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
        return self.revoked_s is None

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models

    def matches(self, secret: str) -> bool:
        """Whether this is its secret; takes the same time whatever it is."""
        return hmac.compare_digest(self.digest, digest_of(secret))

    def revoked(self, now_s: int) -> "AccountKey":
        return replace(self, revoked_s=now_s)

    def as_json(self) -> dict[str, Any]:
        """All but the digest."""
        limits = {field.name: getattr(self.limits, field.name) for field in fields(self.limits)}
        names = ("key_id", "name", "tenant", "cache_group", "is_admin", "created_s", "revoked_s")
        return {**{name: getattr(self, name) for name in names}, "models": list(self.models), "limits": limits}

    @classmethod
    def from_json(cls, value: dict[str, Any], digest: str) -> "AccountKey":
        """What `as_json` made; raises KeyError or TypeError for anything else."""
        limits = KeyLimits(**known_fields(KeyLimits, value["limits"]))
        own = {**known_fields(cls, value), "models": tuple(value["models"]), "limits": limits}
        return cls(**own, digest=digest)


def new_key(name: str, created_s: int, tenant: str | None = None, **more: Any) -> tuple[AccountKey, str]:
    """A key and its secret, which is never seen again. Without a tenant it is one of its own.

    Raises:
        InvalidRequestError: naming what it cannot have.
    """
    key_id = secrets.token_hex(6)
    secret = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    own = key_id if tenant is None else tenant
    key = AccountKey(key_id=key_id, digest=digest_of(secret), name=name, tenant=own, created_s=created_s, **more)
    return key, secret


def key_id_of(secret: str) -> str | None:
    """The key that a secret says it is of; None where it has not a secret's form."""
    found = _SECRET.fullmatch(secret)
    return None if found is None else found.group(1)


def digest_of(secret: str) -> str:
    return hashlib.sha256(b"tandem-api-key-1:" + secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS and value.isprintable()
