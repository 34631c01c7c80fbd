"""Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration: reads the text model of Qwen3.5 and 3.6 from
`text_config`, by `qwen3_5` or `qwen3_5_moe`. Images and video are not served.
"""

from tandem.architecture.families import base, qwen3_5, qwen3_5_moe
from tandem.architecture.families.multimodal import read_text_model
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_TEXT_FAMILIES = {"qwen3_5_text": qwen3_5.FAMILY, "qwen3_5_moe_text": qwen3_5_moe.FAMILY}
OTHER_PARTS_KEYS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "language_model_only",
)  # keys outside `text_config` that may be present and are not read


def _read_model(fields: Fields) -> ModelSpec:
    expected = f"{fields.text('model_type', 'qwen3_5')}_text"

    def read(text: Fields) -> ModelSpec:
        text.only("model_type", (expected,), expected)
        return _TEXT_FAMILIES[expected].read_model(text)

    return read_text_model(fields, read, OTHER_PARTS_KEYS)


FAMILY = base.Family(_read_model, qwen3_5.parameter_name)  # found by `registry`
