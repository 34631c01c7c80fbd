"""The seam between an API's words and the shared core: a dialect reads bodies, its writer puts news into words.

An implementation keeps no state between requests and talks to no other process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.fresh_numbers import FreshNumbers
from tandem.gateway.directory import ModelDirectory
from tandem.gateway.errors import Problem
from tandem.gateway.model import ServedModel
from tandem.gateway.off_loop import OffLoop
from tandem.gateway.request import ChoiceResult, ChoiceUpdate, ServeRequest


class Writer(Protocol):
    """One answer in a dialect's words. `results`, shared with the caller, have taken a batch before it is written."""

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        """Frames of a stream for these updates; may be empty."""
        ...

    def end(self) -> bytes:
        """The last frames of a stream that ended well."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The last frames of a stream that did not."""
        ...

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, understood: what to serve and how to say it.

    Args:
        results: one a choice, in order.
        answer_id: what the client calls the answer, where that does not follow from the request's id.
    """

    request: ServeRequest
    results: tuple[ChoiceResult, ...]
    writer: Writer
    is_stream: bool
    answer_id: str | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Of its answers nothing is told or billed; its prompts are."""
        return all(result.is_prompt_only for result in self.results)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for."""

    max_choices: int
    max_messages: int


@dataclass(frozen=True, slots=True)
class DialectContext:
    """What a dialect may look at."""

    model: ServedModel
    directory: ModelDirectory
    limits: RequestLimits
    fresh: FreshNumbers = field(default_factory=FreshNumbers)
    off_loop: OffLoop = field(default_factory=OffLoop)


class Dialect(Protocol):
    """One endpoint that generates.

    Args:
        kind: chat, text_completion, messages or responses.
        ping: what a stream says that has nothing to say.
    """

    kind: str
    ping: bytes

    async def read(self, body: bytes, request_id: str) -> Asked:
        """Raises InvalidRequestError naming the field that is wrong; UnavailableError when no worker is known."""
        ...

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        """The HTTP status and body of an error."""
        ...
