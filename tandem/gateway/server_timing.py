"""The `server-timing` header: breakdown of the time to the first token, for browsers and `curl -i`. Pure."""

import re
from collections.abc import Sequence

from tandem.core.timeline import Stage

MAX_STAGES = 16
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")


def server_timing(stages: Sequence[Stage]) -> str:
    """Milliseconds by stage, in the order they began; stages of one name are added up."""
    total_s: dict[str, float] = {}
    for stage in stages:
        name = _NO_TOKEN.sub("_", stage.name)
        total_s[name] = total_s.get(name, 0.0) + stage.duration_s
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in list(total_s.items())[:MAX_STAGES])
