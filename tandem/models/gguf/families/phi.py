"""Row of the table `architectures` for GGUF's Phi 3, 3.5 and 4: q, k and v are rows of one tensor, and gate and up of
another, as in a checkpoint.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import LONG_FACTORS, PRE_NORMS, Architecture, Config, SentencePiece, TargetTensor
from tandem.models.gguf.file import GgufFile

_INNER = {
    "attn_qkv": TargetTensor("self_attn.qkv_proj"),
    "attn_output": TargetTensor("self_attn.o_proj"),
    "ffn_up": TargetTensor("mlp.gate_up_proj"),
    "ffn_down": TargetTensor("mlp.down_proj"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """A window of 0 means that there is none (Phi 4)."""
    window = fields.count("attention.sliding_window", 0, low=0)
    original = fields.optional_count("rope.scaling.original_context_length")
    found: dict[str, object] = {"sliding_window": window or None}
    return found if original is None else found | {"original_max_position_embeddings": original}


PHI3 = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    PRE_NORMS | _INNER,
    _read,
    factors=LONG_FACTORS,
    ends=("<|end|>", "<|endoftext|>"),
    has_partial_rope=True,
    sentencepiece=SentencePiece(
        strips_after_control=True,
        stripping=frozenset({"</s>"}),
        unstripping=frozenset({"<unk>", "<s>", "<|endoftext|>"}),
    ),
)
