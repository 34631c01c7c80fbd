"""Gemma3ForConditionalGeneration: the text model inside a multimodal checkpoint. Images are not served.

Its tensors carry a prefix that changed over time; those of the vision tower are left where they are.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.gemma3 import read_text_model
from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD, ModelSpec

_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_KEYS = """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
    image_token_id
"""


def _read_model(fields: Fields) -> ModelSpec:
    text = fields.section("text_config")
    if text is None:
        raise fields.wrong("text_config", "an object")
    model = read_text_model(text)
    tied = fields.flag("tie_word_embeddings", True)
    eos = fields.token_ids("eos_token_id") or model.eos_token_ids
    bos = fields.token_ids("bos_token_id")
    base.check_unread(fields, _IMAGE_KEYS.split())
    return replace(
        model, tie_word_embeddings=tied, eos_token_ids=eos, bos_token_id=bos[0] if bos else model.bos_token_id
    )


def _parameter_name(name: str) -> str | None:
    if name.startswith(_VISION):
        return None
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name if name == HEAD else f"unexpected {name}"


FAMILY = base.Family(_read_model, _parameter_name)
