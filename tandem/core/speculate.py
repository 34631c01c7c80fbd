"""Names of drafters, as requests choose one, and values of `--speculate`, which may also name a directory.

"auto" stands for the drafter that the server prefers, "off" for none.
"""

from typing import Final, Literal, get_args

DrafterChoice = Literal["off", "auto", "ngram", "suffix", "draft", "mtp", "eagle"]
OFF: Final = "off"
AUTO: Final = "auto"
DRAFT: Final = "draft"
MTP: Final = "mtp"
EAGLE: Final = "eagle"
DRAFTER_CHOICES: tuple[str, ...] = get_args(DrafterChoice)
_WITH_DIRECTORY = (DRAFT, EAGLE)
SETTINGS = tuple(f"{name}=DIR" if name in _WITH_DIRECTORY else name for name in DRAFTER_CHOICES)
"""Values of `--speculate`; DIR is a directory, or a model's name as for `--model`."""


def drafter_of(setting: str) -> tuple[str, str | None] | None:
    """Splits a value of `--speculate` into the drafter's name and the directory, if that drafter needs one; None = it
    is not valid.
    """
    name, _, directory = setting.partition("=")
    if (
        name not in DRAFTER_CHOICES
        or (name in _WITH_DIRECTORY) != bool(directory)
        or (setting != name) != bool(directory)
    ):
        return None
    return name, directory or None


def serves_prompts(setting: str) -> bool:
    """Whether a prefill worker keeps a value of `--speculate`. False for "auto", for a draft model, which would be
    loaded for nothing, and for an invalid value. A named head computes the state that is handed over; ngram and suffix
    load nothing.
    """
    found = drafter_of(setting)
    return found is not None and found[0] not in (AUTO, DRAFT)
