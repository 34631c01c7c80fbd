"""Cache of long chats, so that of a request that continues a known chat only the last messages are processed.

A body that begins with the bytes of an earlier one has the same messages there, and these were found valid. It is
resumed at three points. Parsing: the body is shortened to its first message and those from `parse_from` on, where the
message or turn before the last known message begins. Rendering: the last known message. Encoding: the last cut of the
prompt (`known_prefixes`) before that message's text. Entries are found only within the caller's cache scope. Bounded in
bytes; the least recently used are evicted first.
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
from tandem.text.resumption import LoopInputs, Resumption

MIN_MESSAGES = 4  # shorter conversations are not cached
MAX_ALIKE = 64  # cached conversations whose bodies begin with the same bytes, as those of one agent do
MIN_BODY_BYTES = 128 * 1024  # reading a shorter body whole costs no more than remembering it
MAX_BODY_BYTES = 8 * 2**20  # of a known body; computing its digest in the event loop takes under 1 ms
_HEAD_BYTES = 1024  # first bytes of a body; entries are grouped by their digest
_END_BYTES = 64  # last bytes of a known part, by which most other bodies are ruled out
_MAX_DIGESTED_BYTES = 2 * MAX_BODY_BYTES  # digested by one look-up, a millisecond or two in the event loop
_KEY = secrets.token_bytes(32)  # key of the digests
_ENTRY_BYTES = 2048  # measured: memory of an entry's objects, without the parts that grow
_CUT_BYTES = 48  # memory of one cut: a pointer to its key, and its size
_CALL_BYTES = 96  # memory of a call's id, without its characters


# Position of a cache breakpoint, as in `Breakpoint`: index of a tool or of a message, and characters of that message.
BreakpointPlace = tuple[int | None, int | None, int]


@dataclass(frozen=True, slots=True)
class ResumePlaces:
    """Places at which a later body may be resumed, as indices of messages (or items) in the body that was parsed.

    Args:
        last: the last known message: its bytes have to be the same in the later body, and rendering resumes at it.
        parse_from: the first one that is parsed again: where the message or turn before `last` begins.
    """

    last: int
    parse_from: int


@dataclass(frozen=True, slots=True)
class KnownBeginning:
    """Known beginning of a conversation's prompt, up to one of its last messages: rendering and encoding resume there.

    Args:
        num_messages: number of known messages; the last of them is rendered again.
        cut: the prompt's text before the last known message, as the keys of its encoded pieces.
        num_steps: upper bound of the steps that the template took to render that text.
        context_digest: digest of everything besides the messages that the prompt depends on, such as tools.
        resumption: state of the template at the last known message.
        breakpoint_tokens: prompt tokens before each cache breakpoint of the tools and the first two messages.
    """

    num_messages: int
    cut: CutBeginning
    num_steps: int
    context_digest: bytes
    resumption: Resumption
    breakpoint_tokens: Mapping[BreakpointPlace, int] = field(default_factory=dict)

    def admits(self, inputs: LoopInputs) -> bool:
        """Whether a conversation may be resumed here, given the values that its template reads before its messages."""
        return self.resumption.inputs.admits(inputs, self.num_messages - 1)


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """Cache entry: where the messages of a known conversation lie in its body, and what is known of its prompt.

    Args:
        num_bytes: bytes of the body up to the end of its last known message.
        first_end: byte offset of the end of the first message.
        parse_from: byte offset from which a later body is parsed: the second-to-last known message, or an earlier one.
        num_left_out: number of messages between the first one and `parse_from`, which the shortened body does not have.
        calls: tool names by id, of the calls in the messages that are left out; "" where the API needs no names.
        reader_state: state of the API's message reader after these messages; of a small, fixed size.
        end: the last bytes of the known part of the body.
    """

    num_bytes: int
    first_end: int
    parse_from: int
    num_left_out: int
    calls: Mapping[str, str]
    beginning: KnownBeginning
    reader_state: object = None
    end: bytes = b""

    @classmethod
    def of(
        cls,
        spans: MessageSpans,
        places: ResumePlaces,
        calls: Mapping[str, str],
        beginning: KnownBeginning,
        *,
        num_left_out: int = 0,
        reader_state: object = None,
    ) -> "KnownConversation":
        """Creates an entry. `spans`: the messages parsed. `num_left_out`: messages after the first that were not."""
        parse_from = places.parse_from
        return cls(
            spans.ends[places.last],
            spans.ends[0],
            spans.starts[parse_from],
            parse_from - 1 + num_left_out,
            calls,
            beginning,
            reader_state,
        )

    @property
    def num_bytes_left_out(self) -> int:
        """Bytes by which the shortened body is shorter."""
        return self.parse_from - self.first_end - 1

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of this entry."""
        calls = sum(_CALL_BYTES + len(call_id) + len(name) for call_id, name in self.calls.items())
        cut = len(self.beginning.cut.rest) + _CUT_BYTES * len(self.beginning.cut.keys)
        pins = _CUT_BYTES * len(self.beginning.breakpoint_tokens)
        return _ENTRY_BYTES + cut + calls + pins + self.beginning.resumption.num_bytes

    def shortened(self, body: bytes) -> bytes:
        """Returns `body` without the messages that need not be parsed."""
        return b"%b,%b" % (body[: self.first_end], body[self.parse_from :])

    def spans(self, short: MessageSpans) -> MessageSpans:
        """Converts message offsets in the shortened body to the whole body; messages that were left out have none."""
        more = self.num_bytes_left_out
        starts, ends = [start + more for start in short.starts[1:]], [end + more for end in short.ends[1:]]
        return MessageSpans((short.starts[0], *starts), (short.ends[0], *ends))


class BodyDigest:
    """Digests of the beginnings of one body, by which known conversations are recognised.

    A digest is Poly1305 with a random key of this process that is never shown. The last bytes of a beginning are
    compared first, which rules out most other bodies without reading all of them.
    """

    def __init__(self, body: bytes) -> None:
        self._view = memoryview(body)

    def end_of_first(self, num_bytes: int) -> bytes:
        """The last `_END_BYTES` of the first `num_bytes` of the body."""
        return bytes(self._view[num_bytes - _END_BYTES : num_bytes])

    def of_first(self, num_bytes: int) -> bytes:
        """Digest of the first `num_bytes` of the body.

        NOTE: for two bodies that do not depend on the key, the chance of equal digests is below 2**-80. It must not be
        used for secrets, nor shown to anybody.
        """
        return Poly1305.generate_tag(_KEY, self._view[:num_bytes])


class KnownConversations:
    """The cache: a bounded number of bytes of known conversations. Used by one thread.

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
        """Whether conversations in bodies of this length are cached."""
        return self._min_body_bytes <= num_bytes <= MAX_BODY_BYTES

    def find(
        self,
        body: bytes,
        digest: BodyDigest,
        scope: CacheScope,
        kind: str,
        fits: "Callable[[KnownConversation], bool] | None" = None,
    ) -> KnownConversation | None:
        """The longest known conversation that `body` begins with, or None.

        Args:
            digest: the digest of `body`.
            scope: the caller's cache scope.
            kind: the API of the body, since equal bodies mean different conversations in different APIs.
            fits: predicate that the entry has to satisfy; None: every entry does.
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
        """Adds the entry of the conversation in `body`, if its length is worth it; arguments as of `find`."""
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
