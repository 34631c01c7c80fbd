"""Stop strings are found wherever the text was cut, and hold back no more than they must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.text.stop import StopResult, StopStrings


def _run(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    emitted = ""
    for piece in pieces:
        result = stops.add(piece)
        emitted += result.emit
        if result.matched is not None:
            return emitted, result.matched
    return emitted + stops.flush(), None


def _oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest prefix of `text` that ends with a stop string, cut at the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


_TEXT = st.text(alphabet="ab\u00e9\n", max_size=40)
_STOPS = st.lists(st.text(alphabet="ab\u00e9\n", min_size=1, max_size=6), max_size=4)


@given(pieces=st.lists(_TEXT, max_size=8), stops=_STOPS, include=st.booleans())
def test_agrees_with_searching_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    assert _run(StopStrings(stops, include), pieces) == _oracle("".join(pieces), stops, include)


@given(text=_TEXT, stops=_STOPS)
def test_holds_back_exactly_what_could_still_match(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    emitted = ""
    for end, character in enumerate(text, start=1):
        result = watcher.add(character)
        if result.matched is not None:
            return
        emitted += result.emit
        held = text[len(emitted) : end]
        candidates = [stop[:size] for stop in stops for size in range(len(stop))]
        assert held == max((part for part in candidates if text[:end].endswith(part)), key=len, default="")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["one S", "T", "OP two"], ("one ", "STOP")),
        (["STOP"], ["one ST", "ART"], ("one START", None)),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", "\n\n")),
        (["aab"], ["aaa", "b"], ("a", "aab")),
        (["abcd", "bc"], ["abcd"], ("a", "bc")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        ([], ["a", "b"], ("ab", None)),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert _run(StopStrings(stops), pieces) == expected


def test_nothing_follows_a_match() -> None:
    watcher = StopStrings(["."])
    assert watcher.add("a.b") == StopResult("a", ".")
    assert watcher.add("c") == StopResult("")
    assert watcher.flush() == ""


def test_flushing_starts_afresh() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.add("xa") == StopResult("x")
    assert watcher.flush() == "a"
    assert watcher.add("b") == StopResult("b")
