"""Gemma3ForConditionalGeneration: reads the text model inside a multimodal checkpoint of Gemma 3, with `gemma3` from
`text_config`. Images are not served. `parameter_name` maps the text model's tensors and drops those of other parts.
"""

from functools import partial

from tandem.architecture.families import base, gemma3
from tandem.architecture.families.multimodal import parameter_name, read_text_model
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

OTHER_PARTS_KEYS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)  # keys outside `text_config` that may be present and are not read


def _read_inner(text: Fields) -> ModelSpec:
    text.only("final_logit_softcapping", (), "null (transformers bounds no logits of this model, other engines do)")
    return gemma3.read_text_model(text)


FAMILY = base.Family(
    partial(read_text_model, read=_read_inner, other_parts=OTHER_PARTS_KEYS, tied=True), parameter_name
)  # found by `registry`
