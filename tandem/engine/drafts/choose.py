"""Chooses the drafter that a configuration names."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tandem.core.config import EngineConfig
from tandem.core.speculate import AUTO, OFF, drafter_of
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.suffix import SuffixDrafter

FROM_TEXT: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def resolve_drafter(config: EngineConfig, offered_head: Callable[[], str | None]) -> EngineConfig:
    """`config` with a drafter in place of "auto": the head that the checkpoint offers, else "suffix".

    Args:
        offered_head: its value of `speculate`; None = there is none.
    """
    return config if config.speculate != AUTO else replace(config, speculate=offered_head() or _AUTO_DRAFTER)


def name_of_drafter(config: EngineConfig) -> str | None:
    """Name of the drafter that a resolved configuration has; None where nothing drafts."""
    found = drafter_of(config.speculate)
    assert found is not None, config.speculate
    return None if found[0] == OFF else found[0]
