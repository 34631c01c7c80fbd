"""Mistral3ForConditionalGeneration: the text model of Mistral Small 3.1 to 4 and of Ministral 3."""

from tandem.architecture.families import base, ministral3, mistral, mistral4
from tandem.architecture.families.multimodal import parameter_name, text_fields, with_outer_keys
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_TEXT_FAMILIES = {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY, "mistral4": mistral4.FAMILY}
IMAGE_KEYS = (
    "vision_config",
    "image_token_index",
    "image_token_id",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)


def _read_model(fields: Fields) -> ModelSpec:
    text = text_fields(fields)
    model_type = text.text("model_type", "mistral") or "mistral"
    if model_type not in _TEXT_FAMILIES:
        raise text.unsupported("model_type", ", ".join(sorted(_TEXT_FAMILIES)))
    inner = _TEXT_FAMILIES[model_type].read_model(text)
    model = with_outer_keys(fields, inner, tied=inner.tie_word_embeddings)
    base.check_unread(fields, IMAGE_KEYS)
    return model


FAMILY = base.Family(_read_model, parameter_name)
