"""One published checkpoint: its `config.json` and the numbers that its publisher gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BOOKKEEPING: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
"""Keys with the same value in nearly every file."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Published checkpoint: its configuration and known figures.

    Args:
        name: of the repository on the Hugging Face hub.
        config: all keys that are known of its `config.json`; none is made up.
        total: parameters; of a multimodal one, the text model's.
        is_count: `total` is the number of elements in the published safetensors, and not a rounded one.
        active: parameters that one token passes, in billions, as the model card rounds it; None = dense, or
            rounded to one digit.
        kv_bytes: of one token in 16 bits, all layers; None = not known from elsewhere.
        warned: keys that are reported as not read.
        refused: part of the message of the refusal; None = it is read.
        source: public place where a copy of the file was seen; empty = the configuration is from memory.
        recalled: keys that this copy has not, or has otherwise; they are from memory.
    """

    name: str
    config: Mapping[str, Any]
    total: float = 0
    is_count: bool = True
    active: float | None = None
    kv_bytes: int | None = None
    warned: tuple[str, ...] = ()
    refused: str | None = None
    source: str = ""
    recalled: tuple[str, ...] = ()
