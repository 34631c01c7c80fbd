"""Gemma3ForConditionalGeneration: the text model inside a multimodal checkpoint. Images are not served."""

from tandem.architecture.families import base
from tandem.architecture.families.gemma3 import read_text_model
from tandem.architecture.families.multimodal import parameter_name, text_fields, with_outer_keys
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

IMAGE_KEYS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)


def _read_model(fields: Fields) -> ModelSpec:
    model = with_outer_keys(fields, read_text_model(text_fields(fields)), tied=True)
    base.check_unread(fields, IMAGE_KEYS)
    return model


FAMILY = base.Family(_read_model, parameter_name)
