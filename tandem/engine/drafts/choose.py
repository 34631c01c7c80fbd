"""Chooses the drafter that a configuration names."""

from collections.abc import Callable

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import AUTO, DRAFTER_CHOICES, OFF
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.kvcache.spec import KVLayout

_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def choose_drafter(config: EngineConfig, layout: KVLayout) -> str | None:
    """Name of the drafter; None where nothing drafts. "auto" is "suffix" where the model's state can be rewound.

    Raises:
        ConfigurationError: no drafter has that name, or the model cannot check drafts.
    """
    name = config.speculate
    if name == OFF or (name == AUTO and not layout.can_rewind):
        return None
    if name not in DRAFTER_CHOICES:
        raise ConfigurationError(f"speculate={name!r} is no drafter; choose {', '.join(DRAFTER_CHOICES)}")
    if not layout.can_rewind:
        raise ConfigurationError(
            f"speculate={name!r}: this model keeps a recurrent state, from which a wrong draft cannot be taken back; "
            "use off or auto"
        )
    return _AUTO_DRAFTER if name == AUTO else name


def choose_speculation(config: EngineConfig, layout: KVLayout) -> Speculation | None:
    """Speculation with the drafter that `choose_drafter` names.

    Raises:
        ConfigurationError: as `choose_drafter`.
    """
    name = choose_drafter(config, layout)
    return None if name is None else Speculation(_DRAFTERS[name](), config.num_speculative_tokens)
