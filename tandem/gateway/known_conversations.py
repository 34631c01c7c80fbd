"""Cache of long chats by the bytes of their HTTP bodies: of a body that continues one, only the last messages are read.

A body that begins with the same bytes has the same messages there, which were found valid. It is read as a shorter one:
its first message, then those from the second-to-last known one on. What is known of the prompt, whose text and tokens
are not made again, is in `Beginning`. Entries are found only in the caller's own scope. Bounded in bytes; the least
recently used go first.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.poly1305 import Poly1305

from tandem.core.hashing import root_hash
from tandem.core.scope import CacheScope
from tandem.gateway.known_prefixes import CutBeginning
from tandem.gateway.message_spans import MessageSpans
from tandem.text.resumption import Facts, Resumption

MIN_MESSAGES = 4  # that a conversation has to have
MAX_ALIKE = 64  # conversations whose bodies begin alike, as those of one agent do
MIN_BODY_BYTES = 128 * 1024  # reading a shorter body whole costs no more than remembering it
MAX_BODY_BYTES = 8 * 2**20  # of a known one; making its digest in the event loop takes under 1 ms
_HEAD_BYTES = 1024  # of a body, by which those that begin alike are found
_END_BYTES = 64  # of its beginning, by which most other bodies are told apart
_MAX_DIGESTED_BYTES = 2 * MAX_BODY_BYTES  # of beginnings that end alike, a millisecond or two in the event loop
_KEY = secrets.token_bytes(32)
_ENTRY_BYTES = 2048  # measured: the objects of an entry beside what grows
_CUT_BYTES = 48  # of a cut: a pointer to its key, and its size
_CALL_BYTES = 96  # of a call's id, beside its characters


Place = tuple[int | None, int | None, int]  # of a breakpoint: tool, message, characters


@dataclass(frozen=True, slots=True)
class ResumePlaces:
    """Places at which a later body may be resumed, as indices of messages of the body that was read.

    Args:
        last: of the last message whose bytes have to be the same in the later body.
        again: of the first message that is read again, so early that the message before the last is read completely.
    """

    last: int
    again: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """Known beginning of a conversation's prompt, up to one of its last messages.

    Args:
        num_messages: known messages. The last of them is rendered again.
        cut: the text before that one.
        num_steps: upper bound of the template's steps for rendering that text.
        situation: digest of all that the prompt depends on besides the messages.
        resumption: state of the template there.
        pins: tokens before cache breakpoints of the tools and the first messages.
    """

    num_messages: int
    cut: CutBeginning
    num_steps: int
    situation: bytes
    resumption: Resumption
    pins: Mapping[Place, int] = field(default_factory=dict)

    def admits(self, facts: Facts) -> bool:
        """Whether a conversation whose template comes to its messages with these facts may be resumed."""
        return self.resumption.facts.admits(facts, self.num_messages - 1)


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """An entry of the cache.

    Args:
        num_bytes: of the body up to the end of its last known message.
        first_end: of the first message in the body.
        resume_at: where the body is read again: before the message before the last known one, or earlier.
        num_left_out: messages between the first one and `resume_at`, which the shorter body does not have.
        calls: in the messages before; the names of the tools by the ids, where the API has use for them.
        reader: state of the API's reader after these messages; of a small, fixed size.
        end: bytes before the end of the last known message.
    """

    num_bytes: int
    first_end: int
    resume_at: int
    num_left_out: int
    calls: Mapping[str, str]
    beginning: Beginning
    reader: object = None
    end: bytes = b""

    @classmethod
    def of(
        cls,
        spans: MessageSpans,
        places: ResumePlaces,
        calls: Mapping[str, str],
        beginning: Beginning,
        *,
        num_left_out: int = 0,
        reader: object = None,
    ) -> "KnownConversation":
        """`spans`: of the messages that were read. `num_left_out`: those after the first that were not."""
        again = places.again
        return cls(
            spans.ends[places.last],
            spans.ends[0],
            spans.starts[again],
            again - 1 + num_left_out,
            calls,
            beginning,
            reader,
        )

    @property
    def num_bytes_left_out(self) -> int:
        return self.resume_at - self.first_end - 1

    @property
    def memory_bytes(self) -> int:
        calls = sum(_CALL_BYTES + len(call_id) + len(name) for call_id, name in self.calls.items())
        cut = len(self.beginning.cut.rest) + _CUT_BYTES * len(self.beginning.cut.keys)
        pins = _CUT_BYTES * len(self.beginning.pins)
        return _ENTRY_BYTES + cut + calls + pins + self.beginning.resumption.num_bytes

    def shortened(self, body: bytes) -> bytes:
        """`body` without the messages that need not be read."""
        return b"%b,%b" % (body[: self.first_end], body[self.resume_at :])

    def spans(self, short: MessageSpans) -> MessageSpans:
        """Places in the body of the messages whose places in the shortened body are given; those of the messages left
        out are not told.
        """
        more = self.num_bytes_left_out
        starts, ends = [start + more for start in short.starts[1:]], [end + more for end in short.ends[1:]]
        return MessageSpans((short.starts[0], *starts), (short.ends[0], *ends))


class BodyDigest:
    """Digests of the beginnings of a body: Poly1305 with a key of this process, which nobody learns, and the bytes
    before the end, by which most other bodies are told without reading all of them.
    """

    def __init__(self, body: bytes) -> None:
        self._view = memoryview(body)

    def end_of_first(self, num_bytes: int) -> bytes:
        return bytes(self._view[num_bytes - _END_BYTES : num_bytes])

    def of_first(self, num_bytes: int) -> bytes:
        """NOTE: for two bodies that do not depend on the key, the chance of equal digests is below 2**-80. As a
        digest of secrets, or one that is shown, it would not do.
        """
        return Poly1305.generate_tag(_KEY, self._view[:num_bytes])


class KnownConversations:
    """A bounded cache of entries. Used by one thread.

    Args:
        min_body_bytes: of a conversation that is kept, at least 1024.
    """

    def __init__(self, max_bytes: int, min_body_bytes: int = MIN_BODY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._min_body_bytes = max(min_body_bytes, _HEAD_BYTES)
        self._alike: OrderedDict[bytes, OrderedDict[tuple[int, bytes], KnownConversation]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._alike.values()))

    def takes(self, num_bytes: int) -> bool:
        """Whether conversations in bodies of this length are kept."""
        return self._min_body_bytes <= num_bytes <= MAX_BODY_BYTES

    def find(
        self,
        body: bytes,
        digest: BodyDigest,
        scope: CacheScope,
        kind: str,
        fits: "Callable[[KnownConversation], bool] | None" = None,
    ) -> KnownConversation | None:
        """The longest known conversation that `body` begins with.

        Args:
            digest: of the body.
            scope: the caller's own.
            kind: of the API.
            fits: what it has to fulfil.
        """
        head = _head(body, scope, kind)
        alike = self._alike.get(head)
        if alike is None:
            return None
        num_digested = 0
        for key in sorted(alike, reverse=True):
            num_bytes, digest_of_first = key
            entry = alike[key]
            if (
                num_bytes > len(body)
                or digest.end_of_first(num_bytes) != entry.end
                or not (fits is None or fits(entry))
            ):
                continue
            if digest.of_first(num_bytes) == digest_of_first:
                alike.move_to_end(key)
                self._alike.move_to_end(head)
                return entry
            num_digested += num_bytes
            if num_digested >= _MAX_DIGESTED_BYTES:
                break
        return None

    def add(self, body: bytes, digest: BodyDigest, scope: CacheScope, kind: str, entry: KnownConversation) -> None:
        """Keeps what is known of the conversation in `body`, if its length is worth it; arguments as of `find`."""
        if not self.takes(entry.num_bytes) or entry.beginning.num_messages < MIN_MESSAGES:
            return
        head = _head(body, scope, kind)
        alike = self._alike.setdefault(head, OrderedDict())
        key = (entry.num_bytes, digest.of_first(entry.num_bytes))
        if (former := alike.pop(key, None)) is not None:
            self.num_bytes -= former.memory_bytes
        alike[key] = entry = replace(entry, end=digest.end_of_first(entry.num_bytes))
        self.num_bytes += entry.memory_bytes
        self._alike.move_to_end(head)
        if len(alike) > MAX_ALIKE:
            self._forget(alike)
        while self.num_bytes > self._max_bytes:
            head = next(iter(self._alike))
            self._forget(self._alike[head])
            if not self._alike[head]:
                del self._alike[head]

    def _forget(self, alike: OrderedDict[tuple[int, bytes], KnownConversation]) -> None:
        _, entry = alike.popitem(last=False)
        self.num_bytes -= entry.memory_bytes


def _head(body: bytes, scope: CacheScope, kind: str) -> bytes:
    return hashlib.sha256(root_hash(scope, model_fingerprint=kind, block_size=0) + body[:_HEAD_BYTES]).digest()
