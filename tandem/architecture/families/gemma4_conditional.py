"""Gemma4ForConditionalGeneration: the text model of the multimodal Gemma 4."""

from tandem.architecture.families import base
from tandem.architecture.families.gemma4 import read_text_model
from tandem.architecture.families.multimodal import parameter_name, text_fields, with_outer_keys
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

OTHER_PARTS_KEYS = (
    "vision_config",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "audio_token_id",
    "vision_soft_tokens_per_image",
)


def _read_model(fields: Fields) -> ModelSpec:
    model = with_outer_keys(fields, read_text_model(text_fields(fields)), tied=True)
    base.check_unread(fields, OTHER_PARTS_KEYS)
    return model


FAMILY = base.Family(_read_model, parameter_name)
