"""Mamba-2 mixers in GGUF files: which tensor of a Hugging Face checkpoint each of their tensors becomes
(`TargetTensor`), and their sizes, read from the file's metadata. Used by the architectures' modules beside this one.
"""

from dataclasses import dataclass

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import TargetTensor, channelwise, flat, log_of_negated
from tandem.models.gguf.file import GgufFile

_MAX_SIZE = 1 << 12  # largest number of heads, of groups, or of a state's columns


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Sizes in elements, and numbers of `heads` and `groups`. `inner`: of all heads. `taps`: of the convolution."""

    inner: int
    heads: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool

    @property
    def head_dim(self) -> int:
        return self.inner // self.heads


def state_space(prefix: str) -> dict[str, TargetTensor]:
    """By the name of a mixer's tensor in the GGUF file, the tensor of a checkpoint that it becomes, whose name begins
    with `prefix`.
    """
    return {
        "ssm_in": TargetTensor(f"{prefix}.in_proj"),
        "ssm_conv1d.weight": TargetTensor(f"{prefix}.conv1d.weight", change=channelwise),
        "ssm_conv1d.bias": TargetTensor(f"{prefix}.conv1d.bias"),
        "ssm_dt.bias": TargetTensor(f"{prefix}.dt_bias"),
        "ssm_a": TargetTensor(f"{prefix}.A_log", change=log_of_negated),
        "ssm_d": TargetTensor(f"{prefix}.D", change=flat),
        "ssm_norm": TargetTensor(f"{prefix}.norm", change=flat),
        "ssm_out": TargetTensor(f"{prefix}.out_proj"),
    }


def read_state_space(file: GgufFile, fields: Fields) -> StateSpace:
    """Sizes of the mixers, which GGUF gives once for all layers. `fields`: the file's metadata; `file`: tells whether
    there is a bias.
    """
    heads, inner = fields.count("ssm.time_step_rank", high=_MAX_SIZE), fields.count("ssm.inner_size", high=1 << 20)
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank={heads}")
    return StateSpace(
        inner=inner,
        heads=heads,
        groups=fields.count("ssm.group_count", high=_MAX_SIZE),
        state_dim=fields.count("ssm.state_size", high=_MAX_SIZE),
        taps=fields.count("ssm.conv_kernel", low=2, high=64),
        conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
    )
