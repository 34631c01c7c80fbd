"""Messages between the leader of a group and its other ranks, and their encoding. `epoch`: id of a life of the group.

They are pickles, since both ends are one release. `unpack` builds only instances of our own classes, so no message can
run code.
"""

import io
import pickle
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

from tandem.core.config import EngineConfig
from tandem.engine.ranks import ShardSizes
from tandem.ranks.kv_messages import KVAnswer, KVCall
from tandem.scheduler.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Begin:
    """Leader to rank: load your part of this model.

    Args:
        epoch: id of this start of the group.
        config: a rank's share.
        deadline_s: of each exchange.
        num_contexts: parts of a prompt's tokens (`--cp`).
    """

    epoch: str
    rank: int
    num_ranks: int
    num_stages: int
    config: EngineConfig
    deadline_s: float
    log_level: int
    num_contexts: int = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rank to leader: the part is in memory. `fingerprint`: of the whole model."""

    epoch: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank to leader: it cannot serve, and ends."""

    epoch: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Leader to rank: set up the KV memory. `keeps_pages`: keep the KV of an earlier epoch in it."""

    sizes: ShardSizes
    keeps_pages: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rank to leader: it is ready for steps."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Step:
    """Leader to rank: compute your part of this step. `number`: counts the steps of the group, from 1."""

    number: int
    work: SchedulerOutput


FromLeader = Begin | Prepare | Step
ToLeader = Loaded | Refused | Prepared
Message = FromLeader | ToLeader | KVCall | KVAnswer

_ALLOWED_MODULES = (
    *("tandem.core.", "tandem.kvcache.", "tandem.scheduler.", "tandem.engine.ranks", "tandem.compute.page_bytes"),
    *(__name__, "tandem.ranks.kv_messages"),
)
_PLAIN = {
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "set")),
    *(("array", name) for name in ("array", "_array_reconstructor")),
}


def pack(message: Message) -> bytes:
    """Encodes a message."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes | bytearray) -> Any:
    """Reads a message that `pack` made.

    Raises:
        pickle.UnpicklingError: it has something else in it than values of ours.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # NOTE: of bytes that are no pickle, or call one of our values wrongly, it may be any
        raise pickle.UnpicklingError(f"this is no message between ranks: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Allows only dataclasses and enumerations of `_ALLOWED_MODULES`, whose construction has no effects."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _PLAIN:
            return super().find_class(module_name, global_name)
        if module_name.startswith(_ALLOWED_MODULES) and "." not in global_name:
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a message between ranks")
