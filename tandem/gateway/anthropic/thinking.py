"""Reads the thinking options of Anthropic's bodies, and how much earlier thinking is shown to the model again."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.anthropic.fields import MessagesPromptBody, refuse_unknown, unsupported
from tandem.gateway.conversation import Effort, Thinking
from tandem.gateway.errors import RequestError

MIN_BUDGET = 1024  # least number of thinking tokens that a body may ask for
EFFORTS = ("low", "medium", "high", "xhigh", "max")
KINDS = ("enabled", "adaptive", "disabled")
_DISPLAYS = (None, "summarized", "omitted")
CLEAR_THINKING = "clear_thinking_20251015"  # type of the context edit that limits the earlier thinking that is shown


@dataclass(frozen=True, slots=True)
class RequestedThinking:
    """Thinking options. `is_required`: refused for models that cannot think; `is_shown`: clients receive its text."""

    thinking: Thinking
    is_required: bool = False
    is_shown: bool = True


def read_thinking(body: MessagesPromptBody) -> RequestedThinking:
    """The thinking requested by `thinking` and `output_config.effort`; left to the model where both are absent.

    Raises:
        RequestError: naming the value that cannot be honoured.
    """
    effort = _effort(body.output_config or {})
    if body.thinking is None:
        return RequestedThinking(Thinking(effort=effort))
    kind = body.thinking.get("type")
    if kind not in KINDS:
        raise RequestError(f"thinking.type={shown(kind)} must be one of {', '.join(KINDS)}", param="thinking")
    if kind == "disabled":
        refuse_unknown(body.thinking, frozenset({"type"}), "thinking")
        return RequestedThinking(Thinking(effort=Effort.NONE))
    is_enabled = kind == "enabled"
    refuse_unknown(body.thinking, frozenset({"type", "display", *(["budget_tokens"] * is_enabled)}), "thinking")
    budget = _budget(body.thinking.get("budget_tokens")) if is_enabled else None
    return RequestedThinking(Thinking(effort or Effort.HIGH, budget), is_enabled, _is_shown(body.thinking))


def check_budget(asked: RequestedThinking, max_tokens: int) -> None:
    """Raises RequestError where the thinking budget leaves no tokens for an answer."""
    budget = asked.thinking.budget
    if budget is not None and budget >= max_tokens:
        raise RequestError(
            f"thinking.budget_tokens={budget} must be below max_tokens={max_tokens}, which counts thinking too",
            param="thinking",
        )


def read_thinking_turns(body: MessagesPromptBody) -> int | None:
    """Number of latest turns whose thinking is shown to the model again; None = all, 0 = only the turn still being
    answered.

    Raises:
        RequestError: an edit of another kind, or one that is no such edit.
    """
    if body.context_management is None:
        return 0
    refuse_unknown(body.context_management, frozenset({"edits"}), "context_management")
    edits = body.context_management.get("edits") or []
    if not isinstance(edits, list) or len(edits) > 1:
        raise RequestError(
            f"context_management.edits={shown(edits)} must be a list of one edit", param="context_management"
        )
    return _kept_turns(edits[0]) if edits else 0


def _kept_turns(edit: Any) -> int | None:
    where = "context_management.edits.0"
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    if kind != CLEAR_THINKING:
        raise unsupported(f"{where}.type", kind)
    refuse_unknown(edit, frozenset({"type", "keep"}), where)
    keep = edit.get("keep") or {"type": "thinking_turns", "value": 1}
    if keep in ("all", {"type": "all"}):
        return None
    value = keep.get("value") if isinstance(keep, Mapping) and keep.get("type") == "thinking_turns" else None
    if type(value) is not int or value < 1:
        raise RequestError(
            f'{where}.keep={shown(keep)} must be "all" or {{"type": "thinking_turns", "value": 1 or more}}', param=where
        )
    return value


class Signature:
    """Signature of a thinking block: a running digest of its text.

    NOTE: it authenticates nothing and is not checked when a block comes back: clients may write any text as the
    assistant's, conversations begun elsewhere may continue here, and gateways need no shared key.
    """

    def __init__(self, text: str = "") -> None:
        self._digest = hashlib.blake2b(digest_size=32, person=b"thinking")
        self.add(text)

    def add(self, text: str) -> None:
        self._digest.update(text.encode("utf-8", "surrogatepass"))

    @property
    def value(self) -> str:
        return base64.b64encode(self._digest.digest()).decode()


def _effort(config: Mapping[str, Any]) -> Effort | None:
    effort = config.get("effort")
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError(
            f"output_config.effort={shown(effort)} must be one of {', '.join(EFFORTS)}", param="output_config"
        )
    return Effort(effort)


def _budget(budget: Any) -> int:
    if type(budget) is not int or not MIN_BUDGET <= budget < 2**31:
        raise RequestError(
            f"thinking.budget_tokens={shown(budget)} must be an integer from {MIN_BUDGET} up", param="thinking"
        )
    return budget


def _is_shown(thinking: Mapping[str, Any]) -> bool:
    display = thinking.get("display")
    if display not in _DISPLAYS:
        raise RequestError(f"thinking.display={shown(display)} must be 'summarized' or 'omitted'", param="thinking")
    return display != "omitted"
