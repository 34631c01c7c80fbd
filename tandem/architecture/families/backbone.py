"""Parts shared by Mamba-2 and Nemotron-H: sizes of their Mamba-2 mixers, the one norm of each layer, and the names of
tensors, which checkpoints have under `backbone`.
"""

import re
from typing import Final

from tandem.architecture.families.state_space import StateSpaceSizes, check_step_limit
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import NormSpec

UNUSED_KEYS: Final = (
    *("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min"),
    *("time_step_rank", "use_mamba_kernels", "norm_before_gate", "rms_norm", "norm_eps"),
    *("mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min", "mamba_expand"),
)
"""Beside sizes that follow from others and numbers for training, those whose effect is a rounding. NOTE: `transformers`
applies Nemotron-H's `time_step_min` to a prompt and not to what follows; other engines and this one never do.
"""

OTHER_NAMES: Final = {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}
"""Arguments of NVIDIA's own configuration class for Nemotron-H, which transformers reads too, and their usual names."""


def layer_prefix(index: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{index}"


def parameter_name(name: str) -> str:
    """Tandem's name of a checkpoint's tensor; those of attention are named as in Llama."""
    name = name.replace("backbone.", "model.", 1)
    name = re.sub(r"^model\.embeddings?\.", "model.embed_tokens.", name).replace("model.norm_f.", "model.norm.")
    return re.sub(r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1.", name)


def layer_norm(index: int, hidden: int, eps: float) -> NormSpec:
    """The norm at the start of layer `index` of the checkpoint."""
    return NormSpec(f"{layer_prefix(index)}.norm", hidden, eps)


def read_state_space(
    fields: Fields, hidden: int, eps: float, heads: tuple[str, int], head_dim: tuple[str, int], state: tuple[str, int]
) -> StateSpaceSizes:
    """Reads the mixer's sizes. `heads`, `head_dim`, `state`: (key of the family, default) for each of these sizes."""
    check_step_limit(fields)
    num_heads = fields.count(*heads, high=1 << 12)
    groups = fields.count("n_groups", 8, high=1 << 12)
    if num_heads % groups:
        raise fields.wrong("n_groups", f"a divisor of {heads[0]}={num_heads}")
    return StateSpaceSizes(
        hidden=hidden,
        num_heads=num_heads,
        head_dim=fields.count(*head_dim, high=1 << 12),
        num_groups=groups,
        state_dim=fields.count(*state, high=1 << 12),
        taps=fields.count("conv_kernel", 4, low=2, high=64),
        eps=eps,
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
    )
