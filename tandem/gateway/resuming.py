"""Resumes conversations: renders only the messages after a part that is known from an earlier request of the same chat.

Used by `assembly`; `known_conversations` explains the points at which a request resumes. Also creates the
`KnownBeginning` for a later request. Invariant: the prompt equals that of rendering the whole conversation, or
`CannotResumeError` is raised and the whole has to be rendered.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.gateway.conversation import Breakpoint, Conversation
from tandem.gateway.known_conversations import MIN_MESSAGES, BreakpointPlace, KnownBeginning, KnownConversation
from tandem.gateway.marked_conversation import MarkedConversation
from tandem.gateway.model import ServedModel
from tandem.gateway.prompt_encoder import CannotResumeError, EncodedPrompt
from tandem.text.chat_template import Rendered
from tandem.text.resumption import ChangedInputsError
from tandem.text.sandbox import MAX_STEPS
from tandem.text.seen_messages import NotResumableError

# Of the rendered end of a resumed prompt; more than any mark of thinking that is looked for in it.
_MIN_CHARACTERS = 128
_NUM_HEAD = 2  # messages at the beginning that are always read: a system message and a question


class OtherBeginningError(CannotResumeError):
    """The conversation cannot be resumed from this beginning, but may be from another cached one that meets `fits`."""

    def __init__(self, why: str, fits: Callable[[KnownConversation], bool]) -> None:
        super().__init__(why)
        self.fits = fits


@dataclass(frozen=True, slots=True)
class Resumable:
    """A conversation that may be resumed from `beginning`, and from which a later one may be resumed.

    Args:
        template_variables: all variables of the template besides the messages.
        root: root of the prompt's block hashes.
        next_start: index of the message from which a later conversation may be rendered; None: of none.
        beginning: known beginning from which this conversation is resumed; None: it is rendered whole.
    """

    asked: Conversation
    template_variables: Mapping[str, Any]
    root: bytes
    model: ServedModel
    next_start: int | None
    beginning: KnownBeginning | None

    @property
    def start(self) -> int:
        """Index of the first message that is rendered."""
        return 0 if self.beginning is None else self.beginning.num_messages - 1

    async def render(self) -> Rendered | str:
        """Renders the prompt from message `start` on. Returns the reason as text if the template cannot be resumed.

        Raises:
            InvalidRequestError: the template refuses the messages.
            CannotResumeError: the conversation cannot be resumed from `beginning`.
        """
        if self.beginning is None:
            try:
                return await self._render_from(self.asked)
            except NotResumableError as error:
                return str(error)
        if self.beginning.context_digest != self._context_digest():
            raise CannotResumeError("the conversation has other tools, variables or another scope than before")
        if any(self._is_unread(point) for point in self.asked.breakpoints):
            raise CannotResumeError("the conversation has a cache breakpoint that it did not have before")
        try:
            rest = await self._render_from(self.asked)
        except ChangedInputsError as error:
            inputs = error.inputs
            raise OtherBeginningError(str(error), lambda known: known.beginning.admits(inputs)) from error
        except NotResumableError as error:
            raise CannotResumeError(str(error)) from error
        if len(rest.text.strip()) < _MIN_CHARACTERS or rest.num_steps + self.beginning.num_steps > MAX_STEPS:
            raise CannotResumeError("the conversation's end cannot be rendered alone")
        return rest

    async def num_pinned(self, prompt: str, encoded: EncodedPrompt) -> list[int]:
        """Number of tokens before each cache breakpoint of a resumed conversation.

        Args:
            prompt: the text from message `start` on.

        Raises:
            CannotResumeError: a number cannot be determined without rendering the whole conversation.
        """
        assert self.beginning is not None
        late = [point for point in self.asked.breakpoints if _place(point) not in self.beginning.breakpoint_tokens]
        num_before = len(self.beginning.cut.rest.decode("utf-8", "surrogatepass"))
        places = []
        for point in late:
            marked = MarkedConversation.of(self.asked, point)
            try:
                rest = await self._render_from(marked.conversation)
            except NotResumableError as error:
                raise CannotResumeError(str(error)) from error
            place = marked.place(rest.text, prompt)
            if not place:
                raise CannotResumeError("the template may not show the place of a cache breakpoint")
            places.append(num_before + place)
        counted = await self.model.encoder.count_tokens(encoded, places, add_special_tokens=False)
        told = {**self.beginning.breakpoint_tokens, **dict(zip(map(_place, late), counted, strict=True))}
        return [told[_place(point)] for point in self.asked.breakpoints]

    def next_beginning(
        self, prompt: str, encoded: EncodedPrompt, rest: Rendered, num_pinned: Sequence[int]
    ) -> KnownBeginning | None:
        """The beginning from which a later conversation may be resumed; None where prompts are not cut, or without
        `next_start`.

        Args:
            prompt: the text from message `start` on, which begins with the text of `rest`.
            num_pinned: number of tokens before each breakpoint.

        NOTE: the beginning's length in bytes is the whole length minus that of the text after it, which is short.
        """
        if self.next_start is None or self.next_start < self.start:
            return None
        num_bytes = encoded.counts.num_bytes - len(prompt[rest.num_before_kept :].encode("utf-8", "surrogatepass"))
        num_steps = rest.num_steps
        early: Mapping[BreakpointPlace, int] = {}
        if self.beginning is not None:
            num_steps += self.beginning.num_steps
            early = self.beginning.breakpoint_tokens
        cut = self.model.encoder.beginning(encoded, num_bytes)
        if cut is None or not cut.keys or rest.resumption is None:
            return None
        if self.beginning is None:
            most = encoded.ends[len(cut.keys) - 1]
            told = zip(self.asked.breakpoints, num_pinned, strict=True)
            early = {_place(point): number for point, number in told if _is_early(point) and number < most}
        return KnownBeginning(self.next_start + 1, cut, num_steps, self._context_digest(), rest.resumption, early)

    async def _render_from(self, asked: Conversation) -> Rendered:
        former = None if self.beginning is None else self.beginning.resumption
        next_start = self.start if self.next_start is None else max(self.next_start, self.start)
        return await self.model.render_from(asked.messages, self.start, next_start, former, self.template_variables)

    def _is_unread(self, point: Breakpoint) -> bool:
        assert self.beginning is not None
        if _is_early(point):
            return _place(point) not in self.beginning.breakpoint_tokens
        return point.message is None or point.message < self.start

    def _context_digest(self) -> bytes:
        """NOTE: digests Python's own notation, since equal values such as 1, 1.0 and true may be rendered otherwise."""
        return hashlib.sha256(self.root + repr(self.template_variables).encode("utf-8", "surrogatepass")).digest()


def why_not(conversation: Conversation) -> str | None:
    """Reason why a conversation cannot be resumed, nor a later one from it, judging by its fields alone; None: it may
    be.

    NOTE: a later system message may be moved into the first.
    """
    if conversation.is_continued or conversation.add_special_tokens:
        return "it continues a message or adds special tokens"
    later = conversation.messages[1:]
    if len(later) < MIN_MESSAGES - 1:
        return "it has few messages"
    return "it has a later system message" if any(each.get("role") == "system" for each in later) else None


def _is_early(point: Breakpoint) -> bool:
    return point.message is None or point.message < _NUM_HEAD


def _place(point: Breakpoint) -> BreakpointPlace:
    return point.tool, point.message, point.offset
