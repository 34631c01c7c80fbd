"""Renders a conversation from its last known message on, and keeps what the next one may be resumed from.

Invariant: the prompt is that of the whole conversation, or `NotKnownError` is raised and the whole has to be read.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.gateway.conversation import Conversation
from tandem.gateway.known_conversations import MIN_MESSAGES, Beginning
from tandem.gateway.model import ServedModel
from tandem.gateway.prompt_encoder import EncodedPrompt, NotKnownError
from tandem.text.chat_template import Rendered
from tandem.text.resumption import ChangedFactsError, Facts
from tandem.text.sandbox import MAX_STEPS
from tandem.text.seen_messages import NotResumableError

_MIN_CHARACTERS = 128  # of a resumed prompt's end, more than any mark of thinking that is looked for there

Messages = Sequence[Mapping[str, Any]]


class OtherFactsError(NotKnownError):
    """Another known beginning of the conversation may do, if it admits these `facts` of its template."""

    def __init__(self, facts: Facts) -> None:
        super().__init__("the template writes earlier messages otherwise than before")
        self.facts = facts


def why_not(conversation: Conversation) -> str | None:
    """Why a conversation may neither be resumed nor resumed from, as far as its own fields tell; None: it may.

    NOTE: breakpoints are placed in the whole text, and a later system message may be moved into the first.
    """
    if conversation.breakpoints or conversation.is_continued or conversation.add_special_tokens:
        return "it has cache breakpoints, continues a message or adds special tokens"
    later = conversation.messages[1:]
    if len(later) < MIN_MESSAGES - 1:
        return "it has few messages"
    return "it has a later system message" if any(each.get("role") == "system" for each in later) else None


async def render(
    messages: Messages, said: Mapping[str, Any], root: bytes, model: ServedModel, beginning: Beginning | None
) -> Rendered | str:
    """The prompt of a conversation, or its end from the last message of `beginning` on. Why not, where its template
    cannot be resumed.

    Args:
        said: all that the template sees besides the messages.
        root: of the block hashes.

    Raises:
        InvalidRequestError: the template refuses the messages.
        NotKnownError: it cannot be resumed from `beginning`.
    """
    last = len(messages) - 1
    if beginning is None:
        try:
            return await model.render_from(messages, 0, last, None, said)
        except NotResumableError as error:
            return str(error)
    if beginning.situation != _situation(said, root):
        raise NotKnownError("the conversation has other tools, variables or another scope than before")
    try:
        rest = await model.render_from(messages, beginning.num_messages - 1, last, beginning.resumption, said)
    except ChangedFactsError as error:
        raise OtherFactsError(error.facts) from error
    except NotResumableError as error:
        raise NotKnownError(str(error)) from error
    if len(rest.text.strip()) < _MIN_CHARACTERS or rest.num_steps + beginning.num_steps > MAX_STEPS:
        raise NotKnownError("the conversation's end cannot be rendered alone")
    return rest


def next_beginning(
    messages: Messages,
    said: Mapping[str, Any],
    root: bytes,
    model: ServedModel,
    encoded: EncodedPrompt,
    rest: Rendered,
    former: Beginning | None,
) -> Beginning | None:
    """What the next conversation may be resumed from; None where prompts are not cut. `former`: what this one was."""
    num_bytes = len(rest.text[: rest.num_before_kept].encode("utf-8", "surrogatepass"))
    if former is not None:
        num_bytes += former.cut.num_bytes
    cut = model.encoder.beginning(encoded, num_bytes)
    if cut is None or not encoded.cut.keys or rest.resumption is None:
        return None
    num_steps = rest.num_steps + (0 if former is None else former.num_steps)
    return Beginning(len(messages), cut, num_steps, _situation(said, root), rest.resumption)


def _situation(said: Mapping[str, Any], root: bytes) -> bytes:
    """NOTE: the text that Python writes, since values that are equal may be rendered otherwise: 1, 1.0 and true."""
    return hashlib.sha256(root + repr(said).encode("utf-8", "surrogatepass")).digest()
