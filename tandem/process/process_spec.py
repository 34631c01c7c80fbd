"""Description of a process for its supervisor (`supervised`), and the policy of restarting it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Description of one process.

    Args:
        name: unique among its supervisor's.
        argv: program and arguments.
        env: variables it gets besides the supervisor's own; there may be secrets among them.
        without_env: variables of the supervisor it must not see.
        ready_url: URL that answers 200 when it is ready; None = it is ready after `RestartPolicy.settled_s`.
        tier: higher tiers are stopped first, and the next one once all processes above have ended.
        cpus: cores it is confined to; empty = any.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    without_env: frozenset[str] = frozenset()
    ready_url: str | None = None
    tier: int = 0
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Policy of restarting a process that died.

    Args:
        first_delay_s, max_delay_s: the delay before a restart begins with the first, and doubles up to the second.
        settled_s: after a life of this length, the delay begins anew with the first.
        max_failed_starts: a process that dies this often without having been ready ends the whole set of processes.
        grace_s: time from asking a process to end until it is killed.
        probe_s: time between two probes of `ready_url`.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    settled_s: float = 30.0
    max_failed_starts: int = 5
    grace_s: float = 30.0
    probe_s: float = 0.1

    def delay_s(self, num_deaths: int) -> float:
        """The delay after this many deaths in a row, the first being 1."""
        return float(min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_deaths - 1, 32)))
