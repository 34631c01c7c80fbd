import hashlib

import pytest

from tandem.core.hashing import HASH_BYTES, extend_hashes, root_hash
from tandem.core.scope import CacheScope


def chain(root: bytes, token_ids: list[int], block_size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(root, hashes, token_ids, block_size)
    return hashes


def root(model: str = "m", block_size: int = 16, adapter: bytes | None = None, salt: str = "") -> bytes:
    return root_hash(CacheScope(adapter=adapter, salt=salt), model_fingerprint=model, block_size=block_size)


def test_everything_that_state_depends_on_changes_the_root() -> None:
    roots = {
        root(),
        root(model="x"),
        root(block_size=32),
        root(adapter=b"a" * 32),
        root(adapter=b"b" * 32),
        root(salt="s"),
        root(salt="\ud800"),
        root(adapter=b"a" * 32, salt="s"),
    }
    assert len(roots) == 8
    assert all(len(one) == HASH_BYTES for one in roots)


def test_fields_do_not_run_into_each_other() -> None:
    content = "a" * 32
    roots = {root(model="m" + content), root(adapter=content.encode()), root(salt=content), root(model="ms", salt="")}
    assert len(roots | {root(salt="s")}) == 5


def test_the_root_of_a_scope_is_fixed() -> None:
    """Processes of different releases compare these: a change needs a new `HASH_VERSION` or `LAYOUT_VERSION`."""
    fields = (b"m", b"a" * 32, b"s")
    encoded = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    expected = hashlib.sha256(b"tandem-block-hash-2-1-16" + encoded).digest()
    assert root(adapter=b"a" * 32, salt="s") == expected


def test_the_encoding_is_fixed() -> None:
    """Workers of different processes compare these: a change needs a new `HASH_VERSION`."""
    tokens = b"".join(t.to_bytes(4, "little") for t in (1, 2))
    assert chain(b"r", [1, 2, 3]) == [hashlib.sha256(b"r" + tokens).digest()]


def test_only_full_blocks_are_hashed_and_each_covers_all_before_it() -> None:
    assert [len(chain(b"r", [1] * n)) for n in range(5)] == [0, 0, 1, 1, 2]
    assert chain(b"r", [1, 2, 3, 4])[1] != chain(b"r", [0, 2, 3, 4])[1]
    assert chain(b"r", [1, 2, 1, 2])[0] != chain(b"r", [1, 2, 1, 2])[1]
    assert chain(b"r", [1, 2])[0] != chain(b"s", [1, 2])[0]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1])
def test_what_does_not_fit_is_refused(wrong: int) -> None:
    hashes: list[bytes] = []
    with pytest.raises(OverflowError):
        extend_hashes(b"r", hashes, [1, wrong], 2)
    assert hashes == []


def test_extending_step_by_step_equals_hashing_at_once() -> None:
    token_ids = list(range(11))
    hashes: list[bytes] = []
    for end in range(len(token_ids) + 1):
        extend_hashes(b"r", hashes, token_ids[:end], 3)
    assert hashes == chain(b"r", token_ids, 3)
