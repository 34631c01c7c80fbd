"""Table of tensors and reader of sizes for GGUF architectures with Mamba-2 mixers."""

from dataclasses import dataclass

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import TargetTensor, channelwise, flat, log_of_negated
from tandem.models.gguf.file import GgufFile

_MAX_SIZE = 1 << 12  # largest accepted in a file


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
    """Targets of a mixer's tensors, whose names in a checkpoint begin with `prefix`."""
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
    """Sizes of the mixers, the same in all layers."""
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
