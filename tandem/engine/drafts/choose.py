"""Chooses the drafter that a configuration names."""

from collections.abc import Callable

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.kvcache.spec import KVLayout

OFF, AUTO = "off", "auto"
_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_AUTO_DRAFTER = "suffix"


def choose_speculation(config: EngineConfig, layout: KVLayout) -> Speculation | None:
    """None where nothing drafts. "auto" is the suffix drafter where the model's state can be rewound, else none.

    Raises:
        ConfigurationError: no drafter has that name, or the model cannot check drafts.
    """
    name = config.speculate
    if name == OFF or (name == AUTO and not layout.can_rewind):
        return None
    make = _DRAFTERS.get(_AUTO_DRAFTER if name == AUTO else name)
    if make is None:
        raise ConfigurationError(f"speculate={name!r} is no drafter; choose {', '.join((OFF, AUTO, *_DRAFTERS))}")
    if not layout.can_rewind:
        raise ConfigurationError(
            f"speculate={name!r}: this model keeps a recurrent state, from which a wrong draft cannot be taken back; "
            "use off or auto"
        )
    return Speculation(make(), config.num_speculative_tokens)
