"""Gemma 3's text model: norms are stored plus 1, the factor of scores and the layers without a window not at all."""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    Architecture,
    Config,
    Place,
    SentencePiece,
    as_written,
)
from tandem.models.gguf.file import GgufFile

_INNER = {
    "attn_norm": Place("input_layernorm"),
    "post_attention_norm": Place("post_attention_layernorm"),
    "ffn_norm": Place("pre_feedforward_layernorm"),
    "post_ffw_norm": Place("post_feedforward_layernorm"),
}
_LAYERS_OF_27B, _PATTERN, _LOCAL_THETA = 62, 6, 10_000.0


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only("attention.sliding_window_pattern", (_PATTERN,), f"{_PATTERN}")
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    is_27b = config["num_hidden_layers"] == _LAYERS_OF_27B
    found: dict[str, object] = {
        "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_window_pattern": _PATTERN,
        "rope_local_base_freq": as_written(fields.number("rope.freq_base_swa", _LOCAL_THETA)),
    }
    softcap = fields.optional_number("final_logit_softcapping")
    return found if softcap is None else found | {"final_logit_softcapping": as_written(softcap)}


GEMMA3 = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    ATTENTION | HEAD_NORMS | GATED | _INNER,
    _read,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    ends=("<eos>", "<end_of_turn>"),
    norm_offset=1.0,
    sentencepiece=SentencePiece(by_position=True),
)
