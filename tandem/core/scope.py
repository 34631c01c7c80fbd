"""Cache scope: between which requests cached state may be shared.

Invariant: two requests share blocks only where their scopes are equal, because the scope enters the root of every block
hash (`core.hashing.root_hash`). It is made in the gateway and passed on whole: no other process changes or splits it.
"""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError, shown

ADAPTER_BYTES = 32
MAX_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScope:
    """What a request's state depends on, and belongs to, beside the model and the tokens.

    Args:
        adapter: SHA-256 of the content of the adapter that computes it; None = the model's own weights.
        salt: the tenant's, of at most `MAX_SALT_CHARACTERS`; "" = shared by all requests without one.

    Raises:
        InvalidRequestError: naming the field that is neither.
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
