"""One body that may go on from a known conversation: the attempts to read it, from the cheapest to the whole.

Invariant: whatever is refused of a shortened body is read once more as a whole, whose errors name the right place.
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
from tandem.gateway.prompt_encoder import EncodingCounts, NotKnownError
from tandem.gateway.resuming import OtherBeginningError

T = TypeVar("T")
AnyBody = TypeVar("AnyBody")


class KnownBody:
    """A body, and the conversations among which it is looked for.

    Args:
        scope: the caller's own.
        kind: of the API, since equal bodies mean different conversations.
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
        """Whether a conversation in a body of this length is kept."""
        return self._conversations.takes(len(self.body))

    async def read(self, attempt: Callable[[KnownConversation | None], Awaitable[T]]) -> T:
        """The result of `attempt` with the longest known conversation that does, or with None for the whole.

        NOTE: where the template writes earlier messages otherwise than before, as it does with a next question, an
        entry from before them may do.
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
            except NotKnownError as error:
                self._why_whole = str(error)
                break
            except InvalidRequestError:
                break
        return await attempt(None)

    async def parsed(
        self, known: KnownConversation | None, off_loop: OffLoop, parse: Callable[[bytes], AnyBody], member: str
    ) -> tuple[AnyBody, MessageSpans | None]:
        """The body, without the messages that are known, and the places of those it has if they are to be kept.

        Args:
            member: the array of the messages.

        Raises:
            InvalidRequestError: as `parse`.
            NotKnownError: the body has to be read as a whole.
        """
        given = self.body if known is None else known.shortened(self.body)
        is_kept = known is not None or self.is_kept

        def read() -> tuple[AnyBody, MessageSpans | None]:
            asked = parse(given)
            messages = getattr(asked, member)
            spans = MessageSpans.find(given, member) if is_kept and len(messages) > 2 else None
            return asked, spans if spans is not None and len(spans.starts) == len(messages) else None

        asked, spans = await off_loop.run(len(given), read)
        if known is not None and (spans is None or spans.ends[0] != known.first_end):
            raise NotKnownError("the body's messages are others than those known")
        return asked, spans

    def keep(self, entry: KnownConversation) -> None:
        """Keeps what is known of the conversation in this body."""
        self._conversations.add(self.body, self._digest, self._scope, self._kind, entry)

    def counted(self, assembled: Assembled, known: KnownConversation | None) -> EncodingCounts:
        """Counts of encoding the prompt, for the trace."""
        if known is not None:
            return replace(assembled.encoding, num_unread_messages=known.num_left_out)
        why = self._why_whole or assembled.why_whole or "no earlier turn of it is known"
        return replace(assembled.encoding, why_whole=why) if self.is_kept else assembled.encoding

    def _find(self, error: OtherBeginningError | None = None) -> KnownConversation | None:
        fits = None if error is None else error.fits
        return self._conversations.find(self.body, self._digest, self._scope, self._kind, fits)
