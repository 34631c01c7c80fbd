"""Identity of the served model: what the engine must know of it to accept requests, without weights or tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _nothing(_num_tokens: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties of the model that the engine needs to accept requests for it.

    Args:
        fingerprint: keys the prefix cache.
        vocab_size: bounds token ids.
        sampling_defaults: the checkpoint's own (generation_config.json), for callers to start from: the engine itself
            does what a request says.
        drafter: name of the drafter; None = no drafts.
        read_bytes: returns the bytes of KV that the next token reads, given the number of tokens in the context.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    read_bytes: Callable[[int], float] = _nothing
