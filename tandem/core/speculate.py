"""Choices of a drafter: its name, "auto" for the one that the server prefers, or "off"."""

from typing import Final, Literal, get_args

DrafterChoice = Literal["off", "auto", "ngram", "suffix"]
OFF: Final = "off"
AUTO: Final = "auto"
DRAFTER_CHOICES: tuple[str, ...] = get_args(DrafterChoice)
