import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.scope import ADAPTER_BYTES, MAX_SALT_CHARACTERS, UNSCOPED, CacheScope


def test_what_is_not_said_is_shared() -> None:
    assert CacheScope() == UNSCOPED != CacheScope(salt="s")
    assert len({UNSCOPED, CacheScope(salt="s"), CacheScope(adapter=b"a" * ADAPTER_BYTES)}) == 3


@pytest.mark.parametrize("adapter", [b"", b"a" * (ADAPTER_BYTES - 1), b"a" * (ADAPTER_BYTES + 1), "a" * ADAPTER_BYTES])
def test_an_adapter_is_named_by_its_digest(adapter: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"scope\.adapter=.* 32 bytes"):
        CacheScope(adapter=adapter)  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", [None, 5, b"s", "s" * (MAX_SALT_CHARACTERS + 1)])
def test_a_salt_is_short_text(salt: object) -> None:
    CacheScope(salt="s" * MAX_SALT_CHARACTERS)
    with pytest.raises(InvalidRequestError, match=r"scope\.salt=.* at most 256 characters"):
        CacheScope(salt=salt)  # type: ignore[arg-type]
