"""Row of the table `architectures` for GGUF's Falcon-H1: attention and Mamba-2 in parallel. Converters multiply the
weights by its constant factors.
"""

from tandem.architecture.fields import Fields
from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.gguf.families.base import ATTENTION, OUTER, Architecture, Config, TargetTensor
from tandem.models.gguf.families.state_space import read_state_space, state_space
from tandem.models.gguf.file import GgufFile

_INNER = (
    ATTENTION
    | state_space("mamba")
    | {
        "attn_norm": TargetTensor("input_layernorm"),
        **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), TargetTensor("pre_ff_layernorm.weight")),
        "ffn_gate": TargetTensor("feed_forward.gate_proj"),
        "ffn_up": TargetTensor("feed_forward.up_proj"),
        "ffn_down": TargetTensor("feed_forward.down_proj"),
    }
)
_HEAD = "output.weight"


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: embedding and head have different factors, so they cannot be one tensor."""
    if _HEAD not in file.tensors:
        raise UnsupportedCheckpointError(
            f"{file.path} has no tensor {_HEAD!r}: the multiplier of a head that is the embedding is not in GGUF "
            "files; take the model's Hugging Face directory instead"
        )
    sizes = read_state_space(file, fields)
    return {
        "mamba_d_ssm": sizes.inner,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.taps,
        "mamba_conv_bias": sizes.conv_bias,
        "mamba_proj_bias": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


FALCON_H1 = Architecture(
    "falcon_h1",
    "FalconH1ForCausalLM",
    _INNER,
    _read,
    outer=OUTER | {"output_norm.weight": "model.final_layernorm.weight"},
)
