"""Interface between a gateway and a moderator of prompts and answers.

A moderator that cannot decide raises, and the request fails: text that was not judged never passes.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModerationVerdict:
    """A moderator's decision. `category`: the reason for a refusal; None = the text passes."""

    category: str | None = None

    @property
    def passes(self) -> bool:
        return self.category is None


class Moderator(Protocol):
    """Judges texts.

    Args:
        window: characters of an answer that are collected before it is asked.
        overlap: judged characters that are held back and judged again with the next ones, since a match may span both.
    """

    window: int
    overlap: int

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        """Judges a text. The first `num_judged` characters have passed before; `may_go_on`: more text may follow.

        Raises:
            UnavailableError: it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...
