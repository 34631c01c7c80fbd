"""Moderates one answer piece by piece. Invariant: no text is shown before it was judged.

Token ids and logprobs would reveal text that is still held back, so they come with the last update.
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.moderation.base import Moderator
from tandem.gateway.parts import CallArguments, ContentText, Part, Thought
from tandem.gateway.request import ChoiceUpdate


class ModeratedAnswer:
    """Holds back the text of one answer until it was judged. `is_stopped`: moderation has ended the answer."""

    def __init__(self, moderator: Moderator) -> None:
        self._moderator = moderator
        self._held: list[Part] = []
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self._seen = ""  # judged and shown: the end of it, which the next judgement sees again
        self.is_stopped = False

    async def pass_on(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Returns the update with the parts that may be shown now. Raises as `Moderator.judge`."""
        self._held += update.parts
        self._held_ids += update.token_ids
        self._held_logprobs += update.logprobs or ()
        is_last = update.finish_reason is not None
        held = _text(self._held)
        if not is_last and len(held) < self._moderator.window + self._moderator.overlap:
            return _shown(update, ())
        verdict = await self._moderator.judge(self._seen + held, num_judged=len(self._seen), may_go_on=not is_last)
        if not verdict.passes:
            self.is_stopped = True
            return ChoiceUpdate(update.index, (), (), finish_reason=FinishReason.CONTENT_FILTER)
        if not is_last:
            return _shown(update, self._release(held, self._moderator.overlap))
        return _shown(update, self._release(held, 0), self._held_ids, self._held_logprobs)

    def _release(self, held: str, num_kept: int) -> Sequence[Part]:
        """Releases all held parts but the last `num_kept` characters."""
        room = len(held) - num_kept
        seen = self._seen + held[:room]
        self._seen = seen[max(0, len(seen) - self._moderator.overlap) :]
        shown: list[Part] = []
        while self._held and (room > 0 or not _text(self._held[:1])):
            part = self._held.pop(0)
            first, rest = _cut(part, room)
            room -= len(_text([first]))
            shown.append(first)
            if rest is not None:
                self._held.insert(0, rest)
        return shown


def _shown(
    update: ChoiceUpdate, parts: Sequence[Part], ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()
) -> ChoiceUpdate:
    return replace(update, parts=parts, token_ids=tuple(ids), logprobs=tuple(logprobs) or None)


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, (ContentText, Thought, CallArguments)))


def _cut(part: Part, length: int) -> tuple[Part, Part | None]:
    if not isinstance(part, (ContentText, Thought, CallArguments)) or len(part.text) <= length:
        return part, None
    return replace(part, text=part.text[:length]), replace(part, text=part.text[length:])
