"""Report of the ranks (processes) that compute a worker's model together, as part of its status. Values only."""

from dataclasses import dataclass

from tandem.core.expert_rows import ExpertRows


@dataclass(frozen=True, slots=True)
class RankReport:
    """The ranks among which a worker's model is divided.

    pids: process id of each rank; the first is the worker's own. num_epochs: how often the group was formed. experts:
    totals computed by the experts of each rank of the last stage or context; None = the model has no experts, or the
    sender does not count. stages: stage of layers of each rank, from 0; () = all have parts of all layers. contexts:
    part of the prompts of each rank, from 0; () = all have all tokens. hosts: host of each rank; () = all are on the
    worker's own, or the sender does not report them. silent_s: seconds since each rank last showed that it runs; () =
    the sender does not report it.
    """

    pids: tuple[int, ...]
    num_epochs: int
    experts: ExpertRows | None = None
    stages: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    silent_s: tuple[float, ...] = ()
