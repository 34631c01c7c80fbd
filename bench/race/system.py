"""Interface of a system in the race: make its environment, serve a checkpoint, set the length of answers.

A system is served as processes of its own that speak OpenAI's `/v1/completions`, streaming, with a prompt of token ids
and a last event with `usage`. It must never be configured from what a workload is about to send. Each streamed choice
should tell its `token_ids` (a list, vLLM's field): conversations go on with them, and gaps are divided by their number.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.core.errors import TandemError

KV_CACHE_GIB = 2  # of each engine: four systems stand in 24 GB; all workloads fit that keep a shared prefix once


class NotHere(TandemError):  # noqa: N818
    """The system cannot be had on this machine; the message says why and becomes its row in the table."""


@dataclass(frozen=True, slots=True)
class Served:
    """A system that is ready.

    `base_url` has no path (the client adds `/v1/completions`); `model` goes into the request's field of that name.
    `pids` are the roots of the process trees whose memory and CPU time are the system's. `kv_cache_bytes`: what all of
    it takes for keys and values at its start; 0: not known. `is_ready` asks whether it can serve right now.
    `weight_bytes`: of coded weights; None: those of the checkpoint.
    """

    base_url: str
    model: str
    pids: tuple[int, ...]
    kv_cache_bytes: int = 0
    is_ready: Callable[[], bool] = lambda: True
    weight_bytes: int | None = None


class System(Protocol):
    """One that takes part in the race."""

    @property
    def name(self) -> str:
        """As in the table and in `--only`: lower case, with hyphens."""
        ...

    def prepare(self) -> None:
        """Make its environment under build/race, if it is not there yet. Raises NotHere."""
        ...

    def serve(self, checkpoint: Path) -> AbstractContextManager[Served]:
        """Ready when entered, every process gone when left, also by an exception. Raises NotHere, also on entering."""
        ...

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        """Request fields beyond `model`, `prompt`, `max_tokens`, `temperature` (0) and `stream` (with usage).

        They force exactly `num_output` tokens, greedy; a name given here replaces the client's own field of that name.
        """
        ...
