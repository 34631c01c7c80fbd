"""MiniMaxM3SparseForConditionalGeneration: the text model of MiniMax-M3 as it is published. Images and videos are not
served.
"""

from tandem.architecture.families import base
from tandem.architecture.families.minimax_m3 import read_text_model
from tandem.architecture.families.multimodal import parameter_name, text_fields, with_outer_keys
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

IMAGE_KEYS = (
    "vision_config",
    "image_token_index",
    "image_token_id",
    "video_token_index",
    "video_token_id",
    "projector_hidden_size",
    "merged_hidden_size",
)
_NOT_SERVED = ("patch_merge_mlp.", "model.mtp.", "mtp.", "language_model.model.mtp.")
_NAMES = {
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.index_": ".self_attn.indexer.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def _read_model(fields: Fields) -> ModelSpec:
    inner = read_text_model(text_fields(fields), is_fused=False)
    model = with_outer_keys(fields, inner, tied=inner.tie_word_embeddings)
    base.check_unread(fields, IMAGE_KEYS)
    return model


def _parameter_name(name: str) -> str | None:
    """Maps tensor names, as `Family.parameter_name`."""
    if name.startswith(_NOT_SERVED):
        return None
    ours = parameter_name(name)
    for theirs, other in _NAMES.items():
        ours = None if ours is None else ours.replace(theirs, other)
    return ours


FAMILY = base.Family(_read_model, _parameter_name)
