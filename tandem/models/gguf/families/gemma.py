"""Rows of the table `architectures` for GGUF's Gemma 2 and the text model of Gemma 3. Files store 1 + the weights of
norms, and leave out the scale of scores and which layers have no window.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    Architecture,
    Config,
    SentencePiece,
    TargetTensor,
    as_written,
)
from tandem.models.gguf.file import GgufFile

_INNER = {
    "attn_norm": TargetTensor("input_layernorm"),
    "post_attention_norm": TargetTensor("post_attention_layernorm"),
    "ffn_norm": TargetTensor("pre_feedforward_layernorm"),
    "post_ffw_norm": TargetTensor("post_feedforward_layernorm"),
}
_LAYERS_OF_27B, _PATTERN, _LOCAL_THETA = 62, 6, 10_000.0
_LAYERS_OF_2_27B = 46


def _factor_of_scores(config: Config, layers_of_27b: int) -> object:
    """The head size, except in the largest model, where it is hidden size / number of heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    return hidden // heads if config["num_hidden_layers"] == layers_of_27b else config["head_dim"]


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only("attention.sliding_window_pattern", (_PATTERN,), f"{_PATTERN}")
    found: dict[str, object] = {
        "query_pre_attn_scalar": _factor_of_scores(config, _LAYERS_OF_27B),
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_window_pattern": _PATTERN,
        "rope_local_base_freq": as_written(fields.number("rope.freq_base_swa", _LOCAL_THETA)),
    }
    softcap = fields.optional_number("final_logit_softcapping")
    return found if softcap is None else found | {"final_logit_softcapping": as_written(softcap)}


def _read_2(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: files from before July 2024 have no softcaps; all published models have the same."""
    bounds = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        "query_pre_attn_scalar": _factor_of_scores(config, _LAYERS_OF_2_27B),
        "sliding_window": fields.count("attention.sliding_window", 4096),
        **{name: as_written(fields.number(name, usual)) for name, usual in bounds.items()},
    }


GEMMA2 = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    ATTENTION | GATED | _INNER,
    _read_2,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    ends=("<eos>", "<end_of_turn>"),
    norm_offset=1.0,
    sentencepiece=SentencePiece(by_position=True),
)
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
