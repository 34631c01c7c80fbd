"""Cache scope: the requests between which cached state may be shared.

Invariant: two requests share blocks only if their scopes are equal, because the scope is part of the root of every
block hash (`core.hashing.root_hash`). It is created in the gateway and passed on unchanged.
"""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, shown

ADAPTER_BYTES = 32  # of an adapter's SHA-256
MAX_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScope:
    """Adapter and tenant of a request's cached state.

    Args:
        adapter: SHA-256 of the content of the adapter used; None = the base model.
        salt: the tenant's salt, of at most `MAX_SALT_CHARACTERS`; "" = shared by all requests without one.

    Raises:
        InvalidRequestError: a field is invalid; the message names it.
    """

    adapter: bytes | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if self.adapter is not None and not (isinstance(self.adapter, bytes) and len(self.adapter) == ADAPTER_BYTES):
            raise InvalidRequestError(
                f"scope.adapter={shown(self.adapter)} must be None or {ADAPTER_BYTES} bytes, an adapter's SHA-256"
            )
        if not isinstance(self.salt, str) or len(self.salt) > MAX_SALT_CHARACTERS:
            raise InvalidRequestError(
                f"scope.salt={shown(self.salt)} must be text of at most {MAX_SALT_CHARACTERS} characters"
            )


UNSCOPED = CacheScope()
