"""Chooses the drafter that a configuration names."""

from collections.abc import Callable

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import AUTO, DRAFT, OFF, SETTINGS, draft_model
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.kvcache.spec import KVLayout

_FROM_TEXT: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def choose_drafter(config: EngineConfig, layout: KVLayout) -> str | None:
    """Name of the drafter; None where nothing drafts. "auto" is "suffix" where the model's state can be rewound.

    Raises:
        ConfigurationError: no drafter has that name, or the model cannot check drafts.
    """
    setting = config.speculate
    if setting == OFF or (setting == AUTO and not layout.can_rewind):
        return None
    name = DRAFT if draft_model(setting) else _AUTO_DRAFTER if setting == AUTO else setting
    if name not in (*_FROM_TEXT, DRAFT) or setting == DRAFT:
        raise ConfigurationError(f"speculate={setting!r} is no drafter; choose {', '.join(SETTINGS)}")
    if not layout.can_rewind:
        raise ConfigurationError(
            f"speculate={setting!r}: this model keeps a recurrent state, from which a wrong draft cannot be taken "
            "back; use off or auto"
        )
    return name


def choose_speculation(config: EngineConfig, name: str | None, model: Callable[[], Drafter]) -> Speculation | None:
    """Speculation with the drafter of a name that `choose_drafter` returned. `model`: makes the one called "draft"."""
    if name is None:
        return None
    drafter = model() if name == DRAFT else _FROM_TEXT[name]()
    return Speculation(drafter, config.num_speculative_tokens)
