"""Chooses the drafter that a configuration names."""

from collections.abc import Callable, Mapping

from tandem.core.config import EngineConfig
from tandem.core.speculate import AUTO, MTP, OFF, drafter_of
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.suffix import SuffixDrafter

FROM_TEXT: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def choose_drafter(config: EngineConfig, carries_mtp: Callable[[], bool]) -> str | None:
    """Name of the drafter; None where nothing drafts. "auto" is "mtp" where the checkpoint has a module for it, else
    "suffix".
    """
    found = drafter_of(config.speculate)
    assert found is not None, config.speculate
    name, _ = found
    if name == OFF:
        return None
    if name != AUTO:
        return name
    return MTP if carries_mtp() else _AUTO_DRAFTER
