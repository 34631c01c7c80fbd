"""Rows of the table `architectures` for GGUF's Olmo 2 and SmolLM3, dense models that need no metadata keys besides
those common to all.
"""

from tandem.models.gguf.families.base import (
    ATTENTION,
    ATTENTION_WITH_PAIRED_ROWS,
    GATED,
    HEAD_NORMS,
    PRE_NORMS,
    Architecture,
    TargetTensor,
)

_POST_NORMS = {
    "post_attention_norm": TargetTensor("post_attention_layernorm"),
    "post_ffw_norm": TargetTensor("post_feedforward_layernorm"),
}

OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", ATTENTION | HEAD_NORMS | GATED | _POST_NORMS, has_bias_option=True)
SMOLLM3 = Architecture(
    "smollm3", "SmolLM3ForCausalLM", PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | GATED, has_bias_option=True
)
