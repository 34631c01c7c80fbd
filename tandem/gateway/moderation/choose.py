"""Creates the moderator that `--moderation` names."""

import importlib

from tandem.core.errors import ConfigurationError, shown, without_password
from tandem.gateway.moderation.base import Moderator
from tandem.gateway.moderation.blocklist import Blocklist
from tandem.gateway.moderation.endpoint import ModerationEndpoint


def choose_moderator(name: str | None) -> Moderator | None:
    """The moderator for `blocklist:FILE`, an http(s) URL, or `python:MODULE:CALLABLE`, which returns one.

    Raises:
        ConfigurationError: there is no such moderator, or it cannot be used.
    """
    if not name:
        return None
    kind, _, rest = name.partition(":")
    if kind in ("http", "https"):
        return ModerationEndpoint(name)
    if kind == "blocklist" and rest:
        return Blocklist.load(rest)
    if kind == "python" and rest:
        return _imported(rest)
    raise ConfigurationError(
        f"moderation={shown(without_password(name))} is unknown; "
        "use blocklist:FILE, http://…, https://… or python:MODULE:CALLABLE"
    )


def _imported(place: str) -> Moderator:
    module, _, name = place.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"moderation=python:{place} cannot be made: {error!r}") from error
    missing = [part for part in ("window", "overlap", "judge", "close") if not hasattr(made, part)]
    if missing:
        raise ConfigurationError(f"moderation=python:{place} made a {type(made).__name__} without {', '.join(missing)}")
    moderator: Moderator = made
    return moderator
