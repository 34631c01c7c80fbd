"""Processes the updates of a request before they are written: parses, moderates, and adds them to its results.

Invariant: text that a moderator rejects is neither shown nor kept, and the choice ends there.
"""

from collections.abc import Sequence

from tandem.core.output import RequestOutput
from tandem.core.types import FinishReason
from tandem.gateway.moderation.base import Moderator
from tandem.gateway.moderation.moderated import ModeratedAnswer
from tandem.gateway.request import ChoiceResult, ChoiceUpdate


class UpdateFilter:
    """Parses and moderates the updates of one request."""

    def __init__(self, results: Sequence[ChoiceResult], moderator: Moderator | None) -> None:
        self._results = results
        self._answers = None if moderator is None else [ModeratedAnswer(moderator) for _ in results]

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(result.finish_reason is not None for result in self._results)

    @property
    def was_stopped(self) -> bool:
        """Whether a moderator ended any choice."""
        return any(result.finish_reason is FinishReason.CONTENT_FILTER for result in self._results)

    async def apply(self, batch: Sequence[RequestOutput]) -> list[ChoiceUpdate]:
        """Processes a batch and returns the updates to show. Raises as `Moderator.judge`."""
        updates: list[ChoiceUpdate] = []
        for output in batch:
            result = self._results[output.index]
            if result.finish_reason is not None:
                continue  # NOTE: it was stopped, and its worker does not know yet
            update = result.read(output)
            if self._answers is not None:
                update = await self._answers[output.index].pass_on(update)
            result.add(update)
            updates.append(update)
        return updates

    def stop(self) -> list[ChoiceUpdate]:
        """Ends every choice before it began, because moderation rejected the prompt; returns the updates to show."""
        updates = [
            ChoiceUpdate(index, (), (), finish_reason=FinishReason.CONTENT_FILTER)
            for index in range(len(self._results))
        ]
        for result, update in zip(self._results, updates, strict=True):
            result.add(update)
        return updates
