import hashlib

import pytest

from tandem.core.hashing import HASH_BYTES, extend_hashes, root_hash


def chain(root: bytes, token_ids: list[int], block_size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(root, hashes, token_ids, block_size)
    return hashes


@pytest.mark.parametrize(
    "other",
    [
        {"model_fingerprint": "x"},
        {"block_size": 32},
        {"adapter": "a"},
        {"salt": "s"},
        {"model_fingerprint": "ma", "adapter": ""},
        {"adapter": "ms", "salt": ""},
        {"salt": "\ud800"},
    ],
)
def test_everything_the_kv_depends_on_changes_the_root(other: dict[str, str | int]) -> None:
    base: dict[str, str | int] = {"model_fingerprint": "m", "block_size": 16, "adapter": "", "salt": ""}
    assert root_hash(**base) != root_hash(**{**base, **other})  # type: ignore[arg-type]
    assert len(root_hash(**base)) == HASH_BYTES  # type: ignore[arg-type]


def test_fields_do_not_run_into_each_other() -> None:
    roots = {
        root_hash(model_fingerprint=a, block_size=16, adapter=b, salt=c)
        for a, b, c in ["abc", ("ab", "c", ""), ("a", "bc", "")]
    }
    assert len(roots) == 3


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
