"""Renders a chat template for short conversations, to detect properties that its source does not show."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tandem.core.errors import CorruptCheckpointError, InvalidRequestError
from tandem.text.chat_template import ChatTemplate

_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
_USER = {"role": "user", "content": "Hi"}


def trial(
    template: str,
    messages: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
    *,
    begins_with_user: bool = True,
) -> str | None:
    """Renders a user's message, then `messages`; None if the template refuses them. `variables`: further variables."""
    first = (_USER,) if begins_with_user else ()
    try:
        return ChatTemplate({"default": template}, _TOKENS).render([*first, *messages], **variables)
    except (InvalidRequestError, CorruptCheckpointError):
        return None


def refuses_several_calls(template: str) -> bool:
    """Whether the template accepts a message with one call but not one with two."""
    return trial(template, [_calls(1)]) is not None and trial(template, [_calls(2)]) is None


def _calls(num_calls: int) -> Mapping[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "id": f"abcdefgh{n}"} for n in range(num_calls)],
    }
