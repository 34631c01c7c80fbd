"""Choices of a drafter: its name, "auto" for the one that the server prefers, or "off"; and settings, which may name a
draft model.
"""

from typing import Final, Literal, get_args

DrafterChoice = Literal["off", "auto", "ngram", "suffix", "draft"]
OFF: Final = "off"
AUTO: Final = "auto"
DRAFT: Final = "draft"
DRAFTER_CHOICES: tuple[str, ...] = get_args(DrafterChoice)
SETTINGS = (*(name for name in DRAFTER_CHOICES if name != DRAFT), f"{DRAFT}=DIR")
"""Values of `--speculate`; DIR is a directory, or a model's name as for `--model`."""


def draft_model(setting: str) -> str | None:
    """The model that drafts according to a value of `--speculate`; None if none does."""
    name, separator, directory = setting.partition("=")
    return directory if name == DRAFT and separator else None
