"""Table of GGUF's architectures by name, and look-up of the tensors in a Hugging Face checkpoint that each of a file's
tensors becomes. The rows are made in `families`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.families import (
    deepseek,
    dense,
    falcon,
    gemma,
    glm,
    gpt_oss,
    granite,
    kimi,
    lfm2,
    llama,
    minimax,
    nemotron,
    phi,
    qwen,
    qwen35,
    qwen_next,
)
from tandem.models.gguf.families.base import Architecture, Floats, TargetTensor
from tandem.models.gguf.file import GgufFile

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_PARAMETER = re.compile(r"(.+)\.(weight|bias)")
_SHIFTED_NORM = re.compile(r"(blk\.\d+\.)?(?!ssm_)\w*norm\.weight")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen2moe": qwen.QWEN2_MOE,
    "qwen3moe": qwen.QWEN3_MOE,
    "gpt-oss": gpt_oss.GPT_OSS,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "phi3": phi.PHI3,
    "granite": granite.GRANITE,
    "granitemoe": granite.GRANITE_MOE,
    "olmo2": dense.OLMO2,
    "smollm3": dense.SMOLLM3,
    "lfm2": lfm2.LFM2,
    "lfm2moe": lfm2.LFM2_MOE,
    "granitehybrid": granite.GRANITE_HYBRID,
    "qwen3next": qwen_next.QWEN3_NEXT,
    "qwen35": qwen35.QWEN35,
    "qwen35moe": qwen35.QWEN35_MOE,
    "deepseek2": deepseek.DEEPSEEK2,
    "glm4moe": glm.GLM4_MOE,
    "minimax-m2": minimax.MINIMAX_M2,
    "falcon-h1": falcon.FALCON_H1,
    "nemotron_h": nemotron.NEMOTRON_H,
    "nemotron_h_moe": nemotron.NEMOTRON_H_MOE,
    "kimi-linear": kimi.KIMI_LINEAR,
}


def find_architecture(file: GgufFile) -> tuple[str, Architecture]:
    """The architecture's name in GGUF, and its row of the table, which may depend on whether the file has experts.

    Raises:
        UnsupportedCheckpointError: it is not in the table.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptCheckpointError(f"{file.path}: general.architecture is missing; convert or download it again")
    if name not in ARCHITECTURES:
        raise UnsupportedCheckpointError(
            f"{file.path}: general.architecture={name!r} is not served from GGUF; supported: "
            f"{', '.join(ARCHITECTURES)}: take the model's Hugging Face directory instead"
        )
    found = ARCHITECTURES[name]
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    return name, found.with_experts if found.with_experts is not None and has_experts else found


def find_targets(file: GgufFile, architecture: Architecture, name: str) -> tuple[TargetTensor, ...]:
    """The tensors that a GGUF tensor becomes, with complete names; empty if it is read into the configuration instead.

    Raises:
        UnsupportedCheckpointError: the architecture has no such tensor.
    """
    if name in architecture.factors:
        return ()
    targets = _find_targets(architecture, name)
    if targets is None:
        raise UnsupportedCheckpointError(
            f"{file.path}: tensor {name!r} is none of {architecture.class_name}'s, so the file is of another model "
            "than it says"
        )
    if architecture.norm_offset and _SHIFTED_NORM.fullmatch(name):
        return tuple(replace(target, change=_less(architecture.norm_offset)) for target in targets)
    return targets


def _find_targets(architecture: Architecture, name: str) -> tuple[TargetTensor, ...] | None:
    if name in architecture.outer:
        return (TargetTensor(architecture.outer[name]),)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix, rest, suffix = f"{architecture.layers}.{layer[1]}.", layer[2], ""
    found = architecture.inner.get(rest)
    parameter = _PARAMETER.fullmatch(rest)
    if found is None and parameter is not None:
        found, suffix = architecture.inner.get(parameter[1]), f".{parameter[2]}"
    if found is None:
        return None
    targets = found if isinstance(found, tuple) else (found,)
    return tuple(replace(target, name=f"{prefix}{target.name}{suffix}") for target in targets)


def _less(offset: float) -> Callable[[Floats], Floats]:
    return lambda values: values - np.float32(offset)
