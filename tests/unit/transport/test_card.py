"""Cards: what is sealed is what is read, and nothing else is."""

import hmac
import json
from dataclasses import replace

import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError
from tandem.transport.base import MemoryPool
from tandem.transport.card import (
    CARD_VERSION,
    RANKED_CARD_VERSION,
    STAGED_CARD_VERSION,
    Identity,
    accept,
    describe,
    seal,
    unseal,
)
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

POOL = pool_of(seeded_pages(0, 4, 64))


def test_a_card_says_what_was_sealed() -> None:
    identity = Identity(COMPATIBILITY, secret=b"s" * 32)
    card = describe("tcp", identity, POOL, bytes(range(256)))
    assert unseal(seal(card, identity), Identity({}, secret=b"s" * 32)) == card
    assert accept(seal(card, identity), "tcp", Identity(COMPATIBILITY, secret=b"s" * 32), POOL) == card


def test_another_version_is_named_even_though_its_seal_is_right() -> None:
    identity = Identity(COMPATIBILITY, SECRET)
    body = json.dumps({"fields": "of the future"}).encode()
    signed = b"TKVC" + (STAGED_CARD_VERSION + 1).to_bytes(2, "big") + body
    with pytest.raises(IncompatiblePeerError, match="version 4; this worker reads versions 1 to 3"):
        unseal(signed + hmac.digest(identity.key("card"), signed, "sha256"), identity)


def test_incarnations_differ_and_the_secret_stays_out_of_sight() -> None:
    first, second = Identity(COMPATIBILITY, secret=b"secret word 1234"), Identity(COMPATIBILITY, SECRET)
    assert first.incarnation != second.incarnation
    assert "secret word" not in repr(first)
    assert b"secret word" not in seal(describe("tcp", first, POOL, b""), first)
    assert first.key("card") != first.key("tcp")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 5 bytes"):
        Identity(COMPATIBILITY, secret=b"short")


def test_the_order_of_fields_means_nothing() -> None:
    theirs = Identity(dict(reversed(list(COMPATIBILITY.items()))), SECRET)
    accept(seal(describe("tcp", theirs, POOL, b""), theirs), "tcp", Identity(COMPATIBILITY, SECRET), POOL)


def test_a_card_of_a_newer_release_may_say_more() -> None:
    """Regression: a field that this release does not know was a TypeError."""
    identity = Identity(COMPATIBILITY, SECRET)
    sealed = seal(describe("tcp", identity, POOL, b"how"), identity)[:-32]
    said = sealed.replace(b'{"compatibility"', b'{"added": "later", "compatibility"')
    assert said != sealed
    card = unseal(said + hmac.digest(identity.key("card"), said, "sha256"), identity)
    assert card == describe("tcp", identity, POOL, b"how")


def test_a_card_of_one_rank_is_that_of_former_releases_and_one_of_several_is_none() -> None:
    """Regression: the decode workers of the previous release ended at a field that they did not know."""
    identity = Identity(COMPATIBILITY, SECRET)
    for num_ranks, version in ((1, CARD_VERSION), (2, RANKED_CARD_VERSION)):
        pool = replace(POOL, num_ranks=num_ranks, piece_bytes=8)
        sealed = seal(describe("tcp", identity, pool, b"how"), identity)
        names = {"transport", "incarnation", "page_bytes", "num_blocks", "compatibility", "metadata"}
        assert int.from_bytes(sealed[4:6], "big") == version
        assert json.loads(sealed[6:-32]).keys() - names == (set() if num_ranks == 1 else {"num_ranks", "piece_bytes"})
        assert unseal(sealed, identity).num_ranks == num_ranks


@pytest.mark.parametrize(
    ("theirs", "ours", "unit"),
    [
        ((1, 64, 8), (1, 64, 8), 64),
        ((1, 64, None), (1, 32, 8), None),
        ((1, 64, 8), (2, 32, 8), 8),
        ((2, 32, 8), (1, 64, 8), 8),
        ((2, 32, 4), (1, 64, 8), None),
        ((2, 32, 8), (2, 32, 4), 32),
        ((1, 64, 8), (2, 32, None), None),
    ],
)
def test_pools_of_other_widths_are_read_in_pieces(
    theirs: tuple[int, int, int | None], ours: tuple[int, int, int | None], unit: int | None
) -> None:
    """(ranks, bytes of a page, bytes of a piece) of both sides."""
    identity = Identity(COMPATIBILITY, SECRET)
    pools = [MemoryPool(4096, page, 4, "cpu", None, ranks, piece) for ranks, page, piece in (theirs, ours)]
    assert unseal(seal(describe("tcp", identity, pools[0], b""), identity), identity).unit_bytes(pools[1]) == unit


@pytest.mark.parametrize(("num_ranks", "piece_bytes"), [(3, None), (1, 24), (2, 128)])
def test_ranks_and_pieces_divide_a_pool(num_ranks: int, piece_bytes: int | None) -> None:
    with pytest.raises(ConfigurationError, match="ranks have equal numbers of blocks, and blocks whole pieces"):
        MemoryPool(4096, 64, 4, "cpu", None, num_ranks, piece_bytes)


@pytest.mark.parametrize(("page_bytes", "num_blocks", "address"), [(0, 2, 1), (1, 1, 1), (1, 2, 0), (2**32, 2, 1)])
def test_a_pool_that_makes_no_sense_is_refused(page_bytes: int, num_blocks: int, address: int) -> None:
    with pytest.raises(ConfigurationError, match="no pool"):
        MemoryPool(address, page_bytes, num_blocks, "cpu", None)


def test_a_pool_of_too_many_pieces_is_refused_with_the_size_that_fits() -> None:
    MemoryPool(4096, 1 << 15, (1 << 17) - 1, "cpu", None, 1, 2)
    with pytest.raises(ConfigurationError, match=r"pool of 4\.0 GiB has .*give a --kv-cache-gib below 4"):
        MemoryPool(4096, 1 << 15, (1 << 17) + 1, "cpu", None, 1, 2)


def test_stages_are_told_by_a_card_that_releases_without_them_refuse() -> None:
    """Such a release would take two stages for two halves of the heads."""
    identity = Identity(COMPATIBILITY, SECRET)
    pool = replace(POOL, num_ranks=2, piece_bytes=8, stages=(2, 1))
    sealed = seal(describe("tcp", identity, pool, b"how"), identity)
    assert int.from_bytes(sealed[4:6], "big") == STAGED_CARD_VERSION
    card = unseal(sealed, identity)
    assert card.stages == (2, 1)
    assert card.unit_bytes(pool) == pool.page_bytes
    assert card.unit_bytes(replace(pool, stages=())) == 8
