"""Separates an answer's thinking from the rest, which another parser reads.

Invariant: thinking happens once, at the beginning; a later mark is text. Line breaks around thinking are layout and
dropped.
"""

import re
from collections.abc import Sequence

from tandem.gateway.parsing.markers import Markers
from tandem.gateway.parsing.source import UnreadText, Wait
from tandem.gateway.parts import AnswerParser, Part, Thought

_BREAKS = re.compile(r"\n*")


class ThinkingParser:
    """An `AnswerParser`. `is_open`: the prompt ends inside thinking; a model may still repeat the opening mark."""

    def __init__(self, start: str, end: str, inner: AnswerParser, *, is_open: bool) -> None:
        self._start = start
        self._end = Markers(end)
        self._inner = inner
        self._is_open = is_open
        self._source = UnreadText()
        self._parts: list[Part] = []
        self._breaks: list[str] = []  # before more thinking
        self._is_over = False
        self._reading = self._whole()

    def feed(self, text: str) -> Sequence[Part]:
        if self._is_over:
            return self._inner.feed(text)
        self._source.add(text)
        return self._read()

    def finish(self) -> Sequence[Part]:
        if self._is_over:
            return self._inner.finish()
        self._source.end()
        return [*self._read(), *self._inner.finish()]

    def _read(self) -> Sequence[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def _whole(self) -> Wait[None]:
        self._source.record()
        yield from self._source.spaces()
        is_marked = bool(self._start) and (yield from self._source.begins(self._start))
        before = self._source.recorded()
        if is_marked:
            self._source.take(len(self._start))
        if is_marked or self._is_open:
            self._think("" if is_marked else before.lstrip("\n"))
            yield from self._thoughts()
            before = ""
        self._is_over = True
        self._parts += self._inner.feed(before + self._source.take_all())

    def _thoughts(self) -> Wait[None]:
        yield from self._source.run(_BREAKS)
        while True:
            text, marker = self._source.take_before(self._end)
            self._think(text)
            if marker is not None:
                break
            if self._source.is_ended:
                return
            yield
        self._source.take(len(marker))
        yield from self._source.run(_BREAKS)

    def _think(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            self._parts.append(Thought("".join((*self._breaks, body))))
            self._breaks.clear()
        if len(body) < len(text):
            self._breaks.append(text[len(body) :])
