"""Remembered stretches: the same hashes as `core.hashing`'s, bounded memory, no mixing of models and tenants."""

import random
from array import array
from collections.abc import Sequence

import pytest

from tandem.core.chain_hasher import BLOCKS_PER_STRETCH, ChainHasher
from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import UNSCOPED, CacheScope

BLOCK = 16
STRETCH = BLOCK * BLOCKS_PER_STRETCH
ROOT = root_hash(UNSCOPED, model_fingerprint="weights", block_size=BLOCK)


def expected(token_ids: Sequence[int], root: bytes = ROOT, block_size: int = BLOCK) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(root, hashes, list(token_ids), block_size)
    return hashes


@pytest.mark.parametrize("length", [0, 15, 16, STRETCH - 1, STRETCH, STRETCH + 15, STRETCH + 16, 5 * STRETCH + 40])
def test_hashes_are_the_definitions_cold_and_remembered(length: int) -> None:
    hasher, source = ChainHasher(), random.Random(length)
    prompt = [source.randrange(2**31) for _ in range(length)]
    for token_ids in (prompt, array("I", prompt), tuple(prompt)):
        assert hasher.hashes(ROOT, token_ids, BLOCK) == expected(prompt)


def test_prompts_that_part_somewhere_are_told_apart() -> None:
    hasher, source = ChainHasher(), random.Random(1)
    prompt = [source.randrange(100) for _ in range(4 * STRETCH)]
    assert hasher.hashes(ROOT, prompt, BLOCK) == expected(prompt)
    for position in (0, STRETCH - 1, STRETCH, 3 * STRETCH + 7):
        other = [*prompt[:position], 100, *prompt[position + 1 :]]
        assert hasher.hashes(ROOT, other, BLOCK) == expected(other)


def test_stretches_that_end_alike_are_told_apart() -> None:
    """They are looked up by their last block, and the latest is kept."""
    hasher, end = ChainHasher(), [7] * BLOCK
    for first in (1, 2, 1, 2):
        prompt = [first] * (STRETCH - BLOCK) + end
        assert hasher.hashes(ROOT, prompt + prompt, BLOCK) == expected(prompt + prompt)
        num_hashed = hasher.num_hashed
        assert hasher.hashes(ROOT, prompt, BLOCK) == expected(prompt)
        assert hasher.num_hashed == num_hashed


def test_models_tenants_and_block_sizes_do_not_mix() -> None:
    hasher, prompt = ChainHasher(), [7] * (2 * STRETCH)
    for model, block_size in (("weights", 16), ("others", 16), ("weights", 32)):
        for scope in (UNSCOPED, CacheScope(salt="tenant")):
            root = root_hash(scope, model_fingerprint=model, block_size=block_size)
            assert hasher.hashes(root, prompt, block_size) == expected(prompt, root, block_size)


def test_memory_is_bounded_and_what_is_asked_for_stays() -> None:
    hasher = ChainHasher(max_stretches=8)
    often = [1] * STRETCH
    for number in range(100):
        hasher.hashes(ROOT, often, BLOCK)
        assert hasher.hashes(ROOT, [number] * (2 * STRETCH), BLOCK) == expected([number] * (2 * STRETCH))
        assert len(hasher) <= 8


def test_a_remembered_answer_is_the_callers_own() -> None:
    hasher, prompt = ChainHasher(), [3] * STRETCH
    hasher.hashes(ROOT, prompt, BLOCK).clear()
    assert hasher.hashes(ROOT, prompt, BLOCK) == expected(prompt)


def test_a_token_that_is_none_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError):
        ChainHasher().hashes(ROOT, [2**32] * 16, BLOCK)


def test_only_what_is_new_of_a_growing_prompt_is_hashed() -> None:
    """The shorter stretch at a prompt's end is not kept, so it counts once more."""
    hasher, source = ChainHasher(), random.Random(2)
    prompt = array("I", (source.randrange(1000) for _ in range(10 * STRETCH + 5 * BLOCK)))
    hasher.hashes(ROOT, prompt, BLOCK)
    assert hasher.num_hashed == 10 * BLOCKS_PER_STRETCH + 5
    prompt.extend(range(64))
    assert hasher.hashes(ROOT, prompt, BLOCK) == expected(prompt)
    assert hasher.num_hashed == 10 * BLOCKS_PER_STRETCH + 5 + 9
