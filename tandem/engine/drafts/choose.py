"""Resolves the drafter of a configuration: replaces "auto" by a drafter, and names the drafter that is set."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tandem.core.config import EngineConfig
from tandem.core.speculate import AUTO, OFF, drafter_of
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.suffix import SuffixDrafter

# drafters that need no network
FROM_TEXT: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def resolve_drafter(config: EngineConfig, offered_head: Callable[[], str | None]) -> EngineConfig:
    """`config` with "auto" replaced: by the head that comes with the checkpoint, else by "suffix".

    Args:
        offered_head: returns the value of `speculate` for the checkpoint's head; None = it has none.
    """
    return config if config.speculate != AUTO else replace(config, speculate=offered_head() or _AUTO_DRAFTER)


def name_of_drafter(config: EngineConfig) -> str | None:
    """Name of the drafter in a resolved configuration; None = drafts are off."""
    found = drafter_of(config.speculate)
    assert found is not None, config.speculate
    return None if found[0] == OFF else found[0]
