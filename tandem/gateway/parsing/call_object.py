"""Parses one tool call, a JSON object with name and arguments, while its text arrives.

Invariant: the arguments are passed on as the object's own text. The call begins when its name is known or, where any
JSON object may appear, when its arguments begin too; until then it may still turn out to be text.
"""

import json
from collections.abc import Callable, Collection

from tandem.gateway.parsing.extent import json_extent
from tandem.gateway.parsing.output import AnswerOutput, Overlong
from tandem.gateway.parsing.source import LONE_SURROGATE, Malformed, UnreadText, Wait

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallObject:
    """Parser of one object. `is_marked`: a mark before the object says that it is a call.

    `has_begun` and `is_complete` (all arguments were read) are valid also after `read` raised Malformed.
    """

    def __init__(self, source: UnreadText, output: AnswerOutput, names: Collection[str], *, is_marked: bool) -> None:
        self._source = source
        self._output = output
        self._names = names
        self._is_marked = is_marked
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self.has_begun = False
        self.is_complete = False

    def read(self) -> Wait[None]:
        """Reads the object. Raises Malformed if it is no call or breaks off; Overlong past the limit on arguments."""
        source = self._source
        yield from source.expect("{")
        while True:
            yield from source.spaces()
            key = yield from source.string()
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            yield from self._member(key)
            yield from source.spaces()
            if (yield from source.peek()) != ",":
                break
            source.take(1)
        yield from source.expect("}")
        self._close()

    def _member(self, key: str) -> Wait[None]:
        if key == "name" and self._name is None:
            self._name = yield from self._source.string()
            self._check_name()
            if self._is_marked or self._early is not None:
                self._begin()
        elif key in ARGUMENT_KEYS and not self.is_complete and self._early is None:
            yield from self._arguments()
        else:
            yield from self._skipped()

    def _check_name(self) -> None:
        if self._name not in self._names:
            raise Malformed

    def _begin(self) -> None:
        assert self._name is not None
        self._output.begin(self._name)
        self.has_begun = True
        self._source.record()
        if self._early is not None:
            self._complete(self._early)

    def _arguments(self) -> Wait[None]:
        if (yield from self._source.peek()) != "{":
            yield from self._indirect_arguments()
        elif self._name is None:
            self._early = "".join((yield from self._source.value(json_extent())))
        else:
            yield from self._direct_arguments()

    def _direct_arguments(self) -> Wait[None]:
        if not self.has_begun:
            self._begin()
        self._source.recorded()
        yield from stream_value(self._source, self._output.argue)
        self.is_complete = True
        self._source.record()

    def _indirect_arguments(self) -> Wait[None]:
        """Arguments as a string that holds an object, or null, which some models write."""
        if (yield from self._source.peek()) == '"':
            text = _object_text((yield from self._source.string()))
        elif (yield from self._source.scalar()) == "null":
            text = "{}"
        else:
            raise Malformed
        self._early = text
        if self.has_begun:
            self._complete(text)
        elif self._name is not None:
            self._begin()

    def _complete(self, arguments: str) -> None:
        self._source.record()
        self.is_complete = True
        self._output.argue(arguments)

    def _skipped(self) -> Wait[None]:
        character = yield from self._source.peek()
        if character in ("{", "["):
            yield from self._source.value(json_extent())
        elif character == '"':
            yield from self._source.string()
        elif not (yield from self._source.scalar()):
            raise Malformed

    def _close(self) -> None:
        if not self.has_begun:
            raise Malformed
        if not self.is_complete:
            self._complete("{}")
        self._source.recorded()


def stream_value(source: UnreadText, sink: Callable[[str], None]) -> Wait[None]:
    """Passes the text of a JSON object to `sink` while it arrives. Raises Malformed where it breaks off.

    If `sink` raises Overlong, it still gets the rest of the object, so that its excess does not depend on the pieces;
    Overlong is raised then.
    """
    extent = json_extent()
    failure: Malformed | None = None
    while not extent.is_closed:
        if extent.is_broken or not (yield from source.more()):
            raise failure or Malformed
        try:
            sink(source.take_extent(extent))
        except Overlong as error:
            failure = error
    if failure is not None:
        raise failure


def _object_text(text: str) -> str:
    """`text` if it is a JSON object, with lone surrogates escaped. Raises Malformed."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if not isinstance(value, dict):
        raise Malformed
    return text if not LONE_SURROGATE.search(text) else json.dumps(value)
