"""Parses a request body that may continue a known conversation (`known_conversations`); every dialect uses it.

Attempts are made from the cheapest to the most expensive: the body shortened by the longest known conversation, then by
another one, then the whole body. Invariant: an error in a shortened body is never reported; the whole body is parsed
again, so that its errors name the right place.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from tandem.core.errors import InvalidRequestError
from tandem.core.scope import CacheScope
from tandem.gateway.assembly import Assembled
from tandem.gateway.known_conversations import BodyDigest, KnownConversation, KnownConversations
from tandem.gateway.message_spans import MessageSpans
from tandem.gateway.off_loop import OffLoop
from tandem.gateway.prompt_encoder import CannotResumeError, EncodingCounts
from tandem.gateway.resuming import OtherBeginningError

T = TypeVar("T")
AnyBody = TypeVar("AnyBody")


class KnownBody:
    """One body, and the cache in which its conversation is looked up.

    Args:
        scope: the caller's cache scope.
        kind: the API of the body, since equal bodies mean different conversations in different APIs.
    """

    def __init__(self, conversations: KnownConversations, body: bytes, scope: CacheScope, kind: str) -> None:
        self.body = body
        self._conversations = conversations
        self._digest = BodyDigest(body)
        self._scope = scope
        self._kind = kind
        self._why_whole = ""

    @property
    def is_kept(self) -> bool:
        """Whether the cache takes conversations whose bodies have this length."""
        return self._conversations.takes(len(self.body))

    async def read(self, attempt: Callable[[KnownConversation | None], Awaitable[T]]) -> T:
        """Returns the result of the first attempt that succeeds: with a known conversation, else with None for the
        whole body.

        NOTE: where the template writes earlier messages differently than before, as some do once another question
        follows, an entry that ends before these messages may still be used.
        """
        known = self._find()
        for _ in range(2):
            if known is None:
                break
            try:
                return await attempt(known)
            except OtherBeginningError as error:
                self._why_whole = str(error)
                known = self._find(error)
            except CannotResumeError as error:
                self._why_whole = str(error)
                break
            except InvalidRequestError:
                break
        return await attempt(None)

    async def parsed(
        self, known: KnownConversation | None, off_loop: OffLoop, parse: Callable[[bytes], AnyBody], member: str
    ) -> tuple[AnyBody, MessageSpans | None]:
        """Parses the body, shortened if `known` is given; also returns the messages' offsets if the conversation is to
        be cached.

        Args:
            member: name of the array of messages; a body may have text in its place, or nothing.

        Raises:
            InvalidRequestError: as `parse`.
            CannotResumeError: the body has to be read as a whole.
        """
        given = self.body if known is None else known.shortened(self.body)
        is_kept = known is not None or self.is_kept

        def read() -> tuple[AnyBody, MessageSpans | None]:
            asked = parse(given)
            messages = getattr(asked, member)
            if not is_kept or not isinstance(messages, list) or len(messages) <= 2:
                return asked, None
            spans = MessageSpans.find(given, member)
            return asked, spans if spans is not None and len(spans.starts) == len(messages) else None

        asked, spans = await off_loop.run(len(given), read)
        if known is not None and (spans is None or spans.ends[0] != known.first_end):
            raise CannotResumeError("the body's messages are others than those known")
        return asked, spans

    def keep(self, entry: KnownConversation) -> None:
        """Adds the entry of this body's conversation to the cache."""
        self._conversations.add(self.body, self._digest, self._scope, self._kind, entry)

    def counted(self, assembled: Assembled, known: KnownConversation | None) -> EncodingCounts:
        """Counts of bytes, tokens and messages that were known before, for the request's trace."""
        if known is not None:
            return replace(assembled.encoding, num_unread_messages=known.num_left_out)
        why = self._why_whole or assembled.why_whole or "no earlier turn of it is known"
        return replace(assembled.encoding, why_whole=why) if self.is_kept else assembled.encoding

    def _find(self, error: OtherBeginningError | None = None) -> KnownConversation | None:
        fits = None if error is None else error.fits
        return self._conversations.find(self.body, self._digest, self._scope, self._kind, fits)
