"""Leases end once: by release, by time, or with their reader."""

import pytest

from tandem.compute.ranked_pages import OPAQUE
from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError
from tandem.kvcache.block_table import BlockRange
from tandem.worker.leases import LeaseBook


def book_of() -> tuple[LeaseBook, ManualClock, list[str]]:
    clock, ended = ManualClock(), list[str]()
    return LeaseBook(10.0, clock, ended.append), clock, ended


def test_a_lease_is_valid_until_its_time_is_over_and_ends_once() -> None:
    book, clock, ended = book_of()
    book.open("a")
    clock.advance(9.9)
    assert book.is_valid("a")
    clock.advance(0.1)
    assert not book.is_valid("a")
    assert book.expire() == []
    book.end("a")
    assert ended == ["a"]
    assert (len(book), book.num_expired) == (0, 1)


def test_renewing_prolongs_and_tells_what_has_ended() -> None:
    book, clock, ended = book_of()
    book.open("a")
    book.open("b")
    clock.advance(8)
    assert book.renew(["a", "never"]) == ["never"]
    clock.advance(8)
    assert book.renew(["a", "b"]) == ["b"]
    assert ended == ["b"]


def test_a_release_before_the_end_leaves_nothing_to_expire() -> None:
    book, clock, ended = book_of()
    book.open("a")
    book.end("a")
    book.end("a")
    clock.advance(100)
    assert book.expire() == []
    assert (ended, book.num_expired) == (["a"], 0)


def test_expiry_ends_only_what_is_over() -> None:
    book, clock, ended = book_of()
    book.open("a")
    clock.advance(5)
    book.open("b")
    clock.advance(5)
    assert book.expire() == ["a"] == ended
    assert book.is_valid("b")


def test_an_id_cannot_be_taken_twice() -> None:
    book, _, ended = book_of()
    book.open("a")
    with pytest.raises(CapacityError, match="taken"):
        book.open("a")
    assert book.is_valid("a")
    assert ended == []


def test_a_lease_covers_what_was_granted_while_it_lasts() -> None:
    book, clock, _ = book_of()
    book.open("a")
    book.open("b")
    book.grant("a", (BlockRange(0, (1, 2)), BlockRange(5, (7,), (7, 4, 5))))
    book.grant("a", (BlockRange(2, (3,)),))
    assert [book.covered("a", ids) for ids in ([], [1, 7, 3], [1, 4])] == [
        [],
        [(0, (1,)), (1, (7, 4, 5)), (0, (3,))],
        None,
    ]
    book.grant_pages("a", (8, 9))
    assert book.covered("a", [9, 8]) == [(OPAQUE, (9,)), (OPAQUE, (8,))]
    assert book.covered("b", [1]) is None
    book.end("a")
    book.grant("a", (BlockRange(0, (1,)),))
    book.grant_pages("a", (8, 9))
    assert book.covered("a", []) is None
    clock.advance(10)
    assert book.expire() == ["b"]
    assert book.covered("b", []) is None
