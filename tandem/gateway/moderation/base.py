"""The seam between a gateway and whoever decides what may be asked and said.

A moderator that cannot decide raises, and the request fails: what was not judged does not pass.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModerationVerdict:
    """`category`: why it may not pass; None = it may."""

    category: str | None = None

    @property
    def passes(self) -> bool:
        return self.category is None


class Moderator(Protocol):
    """Judges texts. `window`: characters of an answer that are gathered before it is asked; `overlap`: characters it
    must see again, and that are held back, since what it looks for may lie across two pieces.
    """

    window: int
    overlap: int

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        """Of a text whose first `num_judged` characters have passed already, and that may be the beginning of more.

        Raises:
            UnavailableError: it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """End connections."""
        ...
