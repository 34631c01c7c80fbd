"""Keys: their secrets cannot be guessed, are not kept, and what they may do is checked."""

import json
from typing import Any

import pytest

from tandem.accounts.key import AccountKey, KeyLimits, key_id_of, new_key
from tandem.core.errors import InvalidRequestError


def test_a_secret_matches_its_key_only() -> None:
    (one, secret), (other, other_secret) = new_key("a", 1), new_key("b", 1)
    assert secret.startswith("sk-tandem-")
    assert len(secret.rsplit("-", 1)[-1]) <= 43
    assert key_id_of(secret) == one.key_id
    assert one.matches(secret)
    assert not one.matches(other_secret)
    assert not one.matches(secret + "x")
    assert not one.matches("ü")
    assert other.tenant == other.key_id != one.tenant


def test_nothing_that_is_kept_has_the_secret() -> None:
    key, secret = new_key("a", 1)
    kept = json.dumps(key.as_json()) + key.digest + repr(key)
    assert secret.removeprefix(f"sk-tandem-{key.key_id}-") not in kept
    assert "digest" not in key.as_json()
    assert AccountKey.from_json(json.loads(json.dumps(key.as_json())), key.digest) == key


@pytest.mark.parametrize("secret", ["", "sk-tandem-", "sk-tandem-0123456789ab-short", "x" * 10_000, "sk-tandem-\n"])
def test_what_is_no_secret_is_of_no_key(secret: str) -> None:
    assert key_id_of(secret) is None


@pytest.mark.parametrize(
    "limits", [{"concurrency": 0}, {"requests_per_minute": -1}, {"input_tokens_per_minute": 2**40}]
)
def test_limits_must_limit_something(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        KeyLimits(**limits)


@pytest.mark.parametrize(
    "more", [{"name": ""}, {"name": "a\nb"}, {"tenant": ""}, {"cache_group": "x" * 129}, {"models": ("",)}]
)
def test_names_must_be_names(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        new_key(**{"name": "a", "created_s": 1, **more})


def test_models() -> None:
    assert new_key("a", 1)[0].allows("anything")
    assert new_key("a", 1, models=("m",))[0].allows("m")
    assert not new_key("a", 1, models=("m",))[0].allows("n")
