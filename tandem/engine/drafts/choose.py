"""Chooses the drafter that a configuration names."""

from collections.abc import Callable, Mapping

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import AUTO, MTP, OFF, drafter_of
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.kvcache.spec import KVLayout

FROM_TEXT: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def choose_drafter(config: EngineConfig, layout: KVLayout, carries_mtp: Callable[[], bool]) -> str | None:
    """Name of the drafter; None where nothing drafts. "auto" is "mtp" where the checkpoint has a module for it, else
    "suffix"; None where the model's state cannot be rewound.

    Raises:
        ConfigurationError: the model cannot check drafts.
    """
    setting = config.speculate
    found = drafter_of(setting)
    assert found is not None, setting
    name, _ = found
    if name == OFF or (name == AUTO and not layout.can_rewind):
        return None
    if not layout.can_rewind:
        raise ConfigurationError(
            f"speculate={setting!r}: this model keeps a recurrent state, from which a wrong draft cannot be taken "
            "back; use off or auto"
        )
    if name != AUTO:
        return name
    return MTP if carries_mtp() else _AUTO_DRAFTER
