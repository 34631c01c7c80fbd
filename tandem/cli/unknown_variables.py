"""Finds `TANDEM_*` variables that nothing reads, which are mostly mistyped."""

import difflib
from collections.abc import Iterable, Iterator

# Read by something other than the settings of a service.
_OTHERS = ("TANDEM_CACHE_DIR", "TANDEM_API_KEY", "TANDEM_EXPORT", "TANDEM_INLINE")
# Of verbs and tests, which have variables of their own.
_OTHER_PREFIXES = ("TANDEM_LOAD_", "TANDEM_PLAN_", "TANDEM_CLIENTS_", "TANDEM_KUBE_", "TANDEM_STUB_")


def unknown_variables(environment: Iterable[str], settings: Iterable[str]) -> Iterator[str]:
    """Yields a warning for each `TANDEM_*` variable that has no effect.

    Args:
        environment: names of all variables.
        settings: names of settings that are read from variables, as `max_model_len`.
    """
    known = {*_OTHERS, *(f"TANDEM_{name.upper()}" for name in settings)}
    for name in sorted(environment):
        if not name.startswith("TANDEM_") or name in known or name.startswith(_OTHER_PREFIXES):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), 1)
        hint = f"; {nearest[0]} is the nearest that has one" if nearest else ""
        yield f"warning: {name} is set but has no effect here{hint}"
