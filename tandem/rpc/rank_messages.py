"""Report of the ranks (processes) that compute a worker's model together, as part of its status."""

from dataclasses import dataclass

from tandem.core.expert_rows import ExpertRows


@dataclass(frozen=True, slots=True)
class RankReport:
    """The ranks among which a worker's model is divided.

    Each tuple has one entry a rank, by rank.

    Args:
        pids: process ids; the first is the worker's own.
        num_epochs: how often the group of processes was formed, the first time included.
        experts: totals computed by the experts of the ranks of the last stage or context; None = the model has no
            experts, or the sender does not count.
        stages: stage (consecutive layers) of each rank, from 0; () = all have parts of all layers.
        contexts: part of each prompt that a rank has, from 0; () = all have all tokens.
        hosts: machine of each rank; () = all are on the worker's own, or the sender does not report them.
        silent_s: seconds since each rank last showed that it runs; () = the sender does not report it.
    """

    pids: tuple[int, ...]
    num_epochs: int
    experts: ExpertRows | None = None
    stages: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    silent_s: tuple[float, ...] = ()
