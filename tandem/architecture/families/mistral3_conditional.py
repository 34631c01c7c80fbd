"""Mistral3ForConditionalGeneration: reads the text model of Mistral Small 3.1 to 4 and of Ministral 3 from
`text_config`, by the family that its `model_type` names. Images are not served. `parameter_name` maps the text model's
tensors and drops those of other parts.
"""

from functools import partial

from tandem.architecture.families import base, ministral3, mistral, mistral4
from tandem.architecture.families.multimodal import parameter_name, read_text_model
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_TEXT_FAMILIES = {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY, "mistral4": mistral4.FAMILY}
OTHER_PARTS_KEYS = (
    "vision_config",
    "image_token_index",
    "image_token_id",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)  # keys outside `text_config` that may be present and are not read


def _read_inner(text: Fields) -> ModelSpec:
    model_type = text.text("model_type", "mistral") or "mistral"
    if model_type not in _TEXT_FAMILIES:
        raise text.unsupported("model_type", ", ".join(sorted(_TEXT_FAMILIES)))
    if model_type == "mistral" and not (text.has("sliding_window") and text.get("sliding_window") is None):
        text.only("layer_types", (), "absent beside a window, which transformers gives to all layers of this model")
    return _TEXT_FAMILIES[model_type].read_model(text)


# Found by `registry`.
FAMILY = base.Family(partial(read_text_model, read=_read_inner, other_parts=OTHER_PARTS_KEYS), parameter_name)
