"""Tokens come from names: equal names, equal tokens; longer is the same and more."""

import json

from tandem.loadtest.token_text import Tokens, TokenSource


def ids(tokens: Tokens) -> list[int]:
    found: list[int] = json.loads(b"[" + tokens.text + b"]")
    assert len(found) == tokens.count
    return found


def test_a_name_and_a_seed_say_it_all() -> None:
    source = TokenSource(100, 199, seed=1)
    drawn = ids(source.draw("a", 200))
    assert drawn == ids(TokenSource(100, 199, seed=1).draw("a", 200))
    assert drawn != ids(source.draw("b", 200))
    assert drawn != ids(TokenSource(100, 199, seed=2).draw("a", 200))
    assert set(drawn) <= set(range(100, 200))
    assert len(set(drawn)) > 50


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    source = TokenSource(0, 4000, seed=0)
    longest = ids(source.draw("x", 600))
    assert all(ids(source.draw("x", count)) == longest[:count] for count in (1, 2, 3, 17, 512))


def test_blocks_are_kept_within_a_bound() -> None:
    source = TokenSource(10, 99, seed=0)
    first = source.block("0", 1 << 19)
    assert source.block("0", 1 << 19) is first
    for number in range(1, 5):
        source.block(str(number), 1 << 19)
    again = source.block("0", 1 << 19)
    assert again is not first
    assert again == first


def test_parts_are_joined() -> None:
    one, two = Tokens(b"1,2", 2), Tokens(b"3", 1)
    assert ids(one + two) == [1, 2, 3]
    assert one + Tokens() == one
    assert Tokens() + two == two
    assert Tokens() + Tokens() == Tokens()
