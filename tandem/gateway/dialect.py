"""Interface between an API's format and the shared core: a dialect parses bodies, its writer formats updates.

`answer` calls both. An implementation keeps no state from one request to the next and generates nothing: `serving`
does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.fresh_numbers import FreshNumbers
from tandem.core.scope import CacheScope
from tandem.gateway.errors import Problem
from tandem.gateway.model import ServedModel
from tandem.gateway.model_info_cache import ModelInfoCache
from tandem.gateway.off_loop import OffLoop
from tandem.gateway.prompt_encoder import EncodingCounts
from tandem.gateway.request import ChoiceResult, ChoiceUpdate, ServeRequest

Isolate = Callable[[CacheScope], CacheScope]  # makes a scope unique to the caller's tenant or cache group


class Writer(Protocol):
    """Formats one answer: `chunk` for each batch of a stream, then `end` or `failed`; `whole` if it is not streamed.

    The `ChoiceResult`s, shared with the caller, already contain a batch given to `chunk`.
    """

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        """Events of a stream for these updates; may be empty."""
        ...

    def end(self) -> bytes:
        """The last events of a stream that ended well."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The last events of a stream that failed."""
        ...

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed body: the request to serve and the writer of its answer.

    Args:
        results: one for each choice, in order.
        answer_id: the id of the answer that the client sees, where it does not follow from the request's id.
        encoding: how many bytes and tokens the prompt has, and how many were known before; None for prompts that are no
            chats.
    """

    request: ServeRequest
    results: tuple[ChoiceResult, ...]
    writer: Writer
    is_stream: bool
    answer_id: str | None = None
    encoding: EncodingCounts | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Whether only prompts are computed and billed, and no output is returned."""
        return all(result.is_prompt_only for result in self.results)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on the choices and messages of one request."""

    max_choices: int
    max_messages: int


@dataclass(frozen=True, slots=True)
class DialectContext:
    """Parts of the gateway that dialects may use."""

    model: ServedModel
    model_info: ModelInfoCache
    limits: RequestLimits
    fresh: FreshNumbers = field(default_factory=FreshNumbers)
    off_loop: OffLoop = field(default_factory=OffLoop)


class Dialect(Protocol):
    """One generating endpoint of an API.

    Args:
        kind: chat, text_completion, messages or responses.
        ping: bytes that keep a silent stream alive.
    """

    kind: str
    ping: bytes

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        """Parses a body. `isolate`: restricts a scope of cached state to the caller's tenant.

        Raises:
            InvalidRequestError: naming the field.
            UnavailableError: no worker is known.
        """
        ...

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        """The HTTP status and body of an error, in the API's format."""
        ...
