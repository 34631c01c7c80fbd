"""MiniMaxM3SparseForConditionalGeneration: reads the text model inside a published checkpoint of MiniMax-M3, with
`minimax_m3` from `text_config`. Images and video are not served.
"""

from functools import partial

from tandem.architecture.families import base, minimax_m3
from tandem.architecture.families.multimodal import parameter_name, read_text_model

OTHER_PARTS_KEYS = (
    "vision_config",
    "image_token_index",
    "image_token_id",
    "video_token_index",
    "video_token_id",
    "projector_hidden_size",
    "merged_hidden_size",
)  # keys outside `text_config` that may be present and are not read
_NOT_SERVED = ("patch_merge_mlp.", "model.mtp.", "mtp.", "language_model.model.mtp.")
_NAMES = {
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.index_": ".self_attn.indexer.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def _parameter_name(name: str) -> str | None:
    """Maps a tensor's name as `Family.parameter_name` does."""
    if name.startswith(_NOT_SERVED):
        return None
    ours = parameter_name(name)
    for theirs, other in _NAMES.items():
        ours = None if ours is None else ours.replace(theirs, other)
    return ours


FAMILY = base.Family(
    partial(read_text_model, read=partial(minimax_m3.read_text_model, is_fused=False), other_parts=OTHER_PARTS_KEYS),
    _parameter_name,
)  # found by `registry`
