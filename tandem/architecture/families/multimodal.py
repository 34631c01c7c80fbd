"""Reads the text model inside a multimodal checkpoint. Images and sound are not served.

The prefix of the text model's tensors differs between versions; tensors of other parts are not loaded.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD, ModelSpec

_PARTS = ("vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio")
_NOT_SERVED = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in _PARTS)
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_fields(fields: Fields) -> Fields:
    """The text model's configuration. Raises `CorruptCheckpointError` if there is none."""
    text = fields.section("text_config")
    if text is None:
        raise fields.wrong("text_config", "an object")
    return text


def read_text_model(
    fields: Fields, read: Callable[[Fields], ModelSpec], other_parts: Collection[str], *, tied: bool | None = None
) -> ModelSpec:
    """The text model, with the settings that the outer configuration has for it.

    Args:
        read: reads the text model's own configuration.
        other_parts: keys of the outer object that may be present and are not read: of the parts that are not served.
        tied: whether embedding and head are tied, if the outer object does not say; None = as the text model says.
    """
    model = read(text_fields(fields))
    bos = fields.token_ids("bos_token_id")
    model = replace(
        model,
        tie_word_embeddings=fields.flag("tie_word_embeddings", model.tie_word_embeddings if tied is None else tied),
        eos_token_ids=fields.token_ids("eos_token_id") or model.eos_token_ids,
        bos_token_id=bos[0] if bos else model.bos_token_id,
    )
    base.check_unread(fields, other_parts)
    return model


def parameter_name(name: str) -> str | None:
    """Maps a tensor's name as `Family.parameter_name` does."""
    if name.startswith(_NOT_SERVED):
        return None
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name if name == HEAD else f"unexpected {name}"
