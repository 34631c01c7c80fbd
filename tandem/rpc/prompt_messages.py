"""Part of a call that names its prompt, so that later calls send only the tokens after it (see `prompt_reuse`)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """Name under which the called process stores a call's prompt, and a reference to a stored one that it continues.

    NOTE: the fields have the names of the protobuf message `ToldPrompt`, which must not change.

    Args:
        keeper: random bytes that identify the caller; no other process knows them.
        keep_as: number under which the whole prompt is stored.
        known: number of the stored prompt with which this one begins; None: the call has the whole prompt.
        num_known: number of tokens taken from that prompt.
        more_token_ids: the tokens after them.
    """

    keeper: bytes
    keep_as: int
    known: int | None = None
    num_known: int = 0
    more_token_ids: Sequence[int] = ()
