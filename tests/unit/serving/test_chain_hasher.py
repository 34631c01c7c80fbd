"""Remembered stretches: the same hashes as `core.hashing`'s, bounded memory, no mixing of models and tenants."""

import random
from array import array
from collections.abc import Sequence

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.serving.chain_hasher import BLOCKS_PER_STRETCH, ChainHasher
from tandem.serving.fleet_view import Chain

CHAIN = Chain("weights", 16, frozenset({"pool"}))
STRETCH = 16 * BLOCKS_PER_STRETCH


def expected(token_ids: Sequence[int], chain: Chain = CHAIN, scope: CacheScope = UNSCOPED) -> list[bytes]:
    hashes: list[bytes] = []
    root = root_hash(scope, model_fingerprint=chain.model_fingerprint, block_size=chain.block_size)
    extend_hashes(root, hashes, list(token_ids), chain.block_size)
    return hashes


@pytest.mark.parametrize("length", [0, 15, 16, STRETCH - 1, STRETCH, STRETCH + 15, STRETCH + 16, 5 * STRETCH + 40])
def test_hashes_are_the_definitions_cold_and_remembered(length: int) -> None:
    hasher, source = ChainHasher(), random.Random(length)
    prompt = [source.randrange(2**31) for _ in range(length)]
    for token_ids in (prompt, array("I", prompt), tuple(prompt)):
        assert hasher.hashes(CHAIN, token_ids, UNSCOPED) == expected(prompt)


def test_prompts_that_part_somewhere_are_told_apart() -> None:
    hasher, source = ChainHasher(), random.Random(1)
    prompt = [source.randrange(100) for _ in range(4 * STRETCH)]
    assert hasher.hashes(CHAIN, prompt, UNSCOPED) == expected(prompt)
    for position in (0, STRETCH - 1, STRETCH, 3 * STRETCH + 7):
        other = [*prompt[:position], 100, *prompt[position + 1 :]]
        assert hasher.hashes(CHAIN, other, UNSCOPED) == expected(other)


def test_models_tenants_and_block_sizes_do_not_mix() -> None:
    hasher, prompt = ChainHasher(), [7] * (2 * STRETCH)
    for chain in (CHAIN, Chain("others", 16, frozenset()), Chain("weights", 32, frozenset())):
        for scope in (UNSCOPED, CacheScope(salt="tenant")):
            assert hasher.hashes(chain, prompt, scope) == expected(prompt, chain, scope)


def test_memory_is_bounded_and_what_is_asked_for_stays() -> None:
    hasher = ChainHasher(max_stretches=8)
    often = [1] * STRETCH
    for number in range(100):
        hasher.hashes(CHAIN, often, UNSCOPED)
        assert hasher.hashes(CHAIN, [number] * (2 * STRETCH), UNSCOPED) == expected([number] * (2 * STRETCH))
        assert len(hasher) <= 8


def test_a_remembered_answer_is_the_callers_own() -> None:
    hasher, prompt = ChainHasher(), [3] * STRETCH
    hasher.hashes(CHAIN, prompt, UNSCOPED).clear()
    assert hasher.hashes(CHAIN, prompt, UNSCOPED) == expected(prompt)


def test_a_token_that_is_none_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError):
        ChainHasher().hashes(CHAIN, [2**31] * 16, UNSCOPED)
