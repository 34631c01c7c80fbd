"""Sane ids are kept, live ones are never shared."""

import pytest

from tandem.gateway.request_ids import RequestIds, is_sane


@pytest.mark.parametrize("wanted", ["", "a b", "a\n", "ä", "a/1", "x" * 129, "\x7f"])
def test_an_id_that_is_not_sane_is_replaced(wanted: str) -> None:
    assert not is_sane(wanted)
    assert RequestIds().claim(wanted).startswith("req-")


def test_an_id_is_free_again_once_released() -> None:
    ids = RequestIds()
    assert ids.claim("x" * 128) == "x" * 128
    assert ids.claim("mine") == "mine"
    other = ids.claim("mine")
    assert other.startswith("mine~")
    ids.release("mine")
    assert ids.claim("mine") == "mine"
    assert ids.claim(None) != ids.claim(None)


def test_a_shared_id_is_free_once_all_have_released_it() -> None:
    ids = RequestIds()
    ids.share(ids.claim("mine"))
    ids.release("mine")
    assert ids.claim("mine") != "mine"
    ids.release("mine")
    assert ids.claim("mine") == "mine"
