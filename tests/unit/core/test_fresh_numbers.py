"""Fresh numbers do not repeat, neither within a source nor between two."""

from tandem.core.fresh_numbers import FreshNumbers


def test_numbers_differ_and_have_the_size_that_was_asked_for() -> None:
    first, second = FreshNumbers(), FreshNumbers()
    found = [source.bits(63) for source in (first, second) for _ in range(1000)]
    assert len(set(found)) == 2000
    assert all(0 <= number < 2**63 for number in found)
    assert max(found).bit_length() > 60
    assert sum(number & 1 for number in found) in range(850, 1150)


def test_digits_are_padded() -> None:
    source = FreshNumbers()
    assert {len(source.hex(8)) for _ in range(500)} == {8}
    assert all(int(source.hex(32), 16) < 2**128 for _ in range(10))
