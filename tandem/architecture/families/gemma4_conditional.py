"""Gemma4ForConditionalGeneration: reads the text model inside a multimodal checkpoint of Gemma 4, with `gemma4` from
`text_config`. Images and sound are not served. `parameter_name` maps the text model's tensors and drops those of other
parts.
"""

from functools import partial

from tandem.architecture.families import base, gemma4
from tandem.architecture.families.multimodal import parameter_name, read_text_model

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
)  # keys outside `text_config` that may be present and are not read


FAMILY = base.Family(
    partial(read_text_model, read=gemma4.read_text_model, other_parts=OTHER_PARTS_KEYS, tied=True), parameter_name
)  # found by `registry`
