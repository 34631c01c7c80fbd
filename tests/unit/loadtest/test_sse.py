"""Events come out whole, wherever the chunks end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.loadtest import sse
from tandem.loadtest.failure import ExchangeError
from tandem.loadtest.sse import EventReader


def read(*chunks: bytes) -> list[bytes]:
    reader = EventReader()
    return [data for chunk in chunks for data in reader.feed(chunk)]


STREAM = b'data: {"a": 1}\n\n: keep open\n\nevent: x\ndata: two\ndata:lines\n\nid: 7\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_whole_events() -> None:
    assert read(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_chunks_may_end_anywhere(ends: list[int], line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    cuts = [0, *sorted(ends), len(stream)]
    reader = EventReader()
    found = [data for a, b in itertools.pairwise(cuts) for data in reader.feed(stream[a:b])]
    found += list(reader.feed(b"\n")) if line_end == b"\r" else []
    assert found == EVENTS
    assert reader.is_empty


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_chunk_may_end_at_every_single_place(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    for end in range(len(stream)):
        assert read(stream[:end], stream[end:]) == EVENTS, end


def test_what_is_left_is_known() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: x\n\nda")) == [b"x"]
    assert not reader.is_empty


@pytest.mark.parametrize("garbage", [b"<html>\n\n", b"data: x\nnonsense\n\n", b"dota: x\n\n"])
def test_what_is_no_event_is_told(garbage: bytes) -> None:
    with pytest.raises(ExchangeError, match="is no line of an event"):
        read(garbage)


def test_an_event_without_an_end_is_bounded() -> None:
    reader = EventReader()
    list(reader.feed(b"x" * sse.MAX_EVENT_BYTES))
    with pytest.raises(ExchangeError, match="longer than"):
        list(reader.feed(b"x"))
