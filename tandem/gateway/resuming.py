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
from tandem.text.sandbox import MAX_STEPS

_MIN_CHARACTERS = 128  # of a resumed prompt's end, more than any mark of thinking that is looked for there

Messages = Sequence[Mapping[str, Any]]


def may_resume(conversation: Conversation) -> bool:
    """Whether a conversation may be resumed, and resumed from, as far as its own fields tell.

    NOTE: breakpoints are placed in the whole text, and a later system message may be moved into the first.
    """
    if conversation.breakpoints or conversation.is_continued or conversation.add_special_tokens:
        return False
    later = conversation.messages[1:]
    return len(later) >= MIN_MESSAGES - 1 and all(each.get("role") != "system" for each in later)


async def render(
    messages: Messages, said: Mapping[str, Any], root: bytes, model: ServedModel, beginning: Beginning | None
) -> Rendered | None:
    """The prompt of a conversation, or its end from the last message of `beginning` on. None where its template cannot
    be resumed.

    Args:
        said: all that the template sees besides the messages.
        root: of the block hashes.

    Raises:
        InvalidRequestError: the template refuses the messages.
        NotKnownError: it cannot be resumed from `beginning`.
    """
    if beginning is None:
        return await model.render_from(messages, 0, said)
    if beginning.situation != _situation(said, root):
        raise NotKnownError("the conversation has other tools, variables or another scope than before")
    rest = await model.render_from(messages, beginning.num_messages - 1, said)
    if rest is None or len(rest.text.strip()) < _MIN_CHARACTERS or rest.num_steps + beginning.num_steps > MAX_STEPS:
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
    num_bytes = len(rest.text[: rest.num_before_last].encode("utf-8", "surrogatepass"))
    if former is not None:
        num_bytes += former.cut.num_bytes
    cut = model.encoder.beginning(encoded, num_bytes)
    if cut is None or not encoded.cut.keys:
        return None
    num_steps = rest.num_steps + (0 if former is None else former.num_steps)
    return Beginning(len(messages), cut, num_steps, _situation(said, root))


def _situation(said: Mapping[str, Any], root: bytes) -> bytes:
    """NOTE: the text that Python writes, since values that are equal may be rendered otherwise: 1, 1.0 and true."""
    return hashlib.sha256(root + repr(said).encode("utf-8", "surrogatepass")).digest()
