"""Ranks of a worker, as its status tells them. Values only."""

from dataclasses import dataclass

from tandem.core.expert_rows import ExpertRows


@dataclass(frozen=True, slots=True)
class RankReport:
    """Processes among which a worker's model is divided.

    pids: by rank; the first is the worker's own.
    num_epochs: how often the group was formed.
    experts: what the experts of each rank of the last stage or context have computed; None = the model has none, or the
        sender does not count it.
    stages: the stage of layers of each rank, from 0; () = all have parts of all layers.
    contexts: the part of prompts of each rank, from 0; () = all have all tokens.
    hosts: of each rank; () = all are on the worker's own, or the sender does not tell.
    silent_s: seconds since each rank has last shown that it runs; () = the sender does not tell.
    """

    pids: tuple[int, ...]
    num_epochs: int
    experts: ExpertRows | None = None
    stages: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    silent_s: tuple[float, ...] = ()
