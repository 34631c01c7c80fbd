"""GGUF's architectures by name, and the place of each tensor in a Hugging Face checkpoint."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.families import dense, gemma, gpt_oss, granite, llama, phi, qwen
from tandem.models.gguf.families.base import Architecture, Floats, Place
from tandem.models.gguf.file import GgufFile

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_PARAMETER = re.compile(r"(.+)\.(weight|bias)")
_NORM = re.compile(r"(blk\.\d+\.)?\w*norm\.weight")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen2moe": qwen.QWEN2_MOE,
    "qwen3moe": qwen.QWEN3_MOE,
    "gpt-oss": gpt_oss.GPT_OSS,
    "gemma3": gemma.GEMMA3,
    "phi3": phi.PHI3,
    "granite": granite.GRANITE,
    "olmo2": dense.OLMO2,
    "smollm3": dense.SMOLLM3,
}


def find_architecture(file: GgufFile) -> tuple[str, Architecture]:
    """The architecture's name in GGUF, and its row of the table.

    Raises:
        UnsupportedCheckpointError: it is none of the table's, or the file is one of several.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptCheckpointError(f"{file.path}: general.architecture is missing; convert or download it again")
    if name not in ARCHITECTURES:
        raise UnsupportedCheckpointError(
            f"{file.path}: general.architecture={name!r} is not served from GGUF; supported: "
            f"{', '.join(ARCHITECTURES)}: take the model's Hugging Face directory instead"
        )
    num_parts = file.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise UnsupportedCheckpointError(
            f"{file.path}: split.count={num_parts}: it is one of several files; join them with "
            "`llama-gguf-split --merge`"
        )
    found = ARCHITECTURES[name]
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    return name, found.with_experts if found.with_experts is not None and has_experts else found


def find_place(file: GgufFile, architecture: Architecture, name: str) -> Place | None:
    """Where a GGUF tensor goes, by its full name; None for one that became part of the configuration.

    Raises:
        UnsupportedCheckpointError: the architecture has no such tensor.
    """
    if name in architecture.factors:
        return None
    place = _find_place(architecture, name)
    if place is None:
        raise UnsupportedCheckpointError(
            f"{file.path}: tensor {name!r} is none of {architecture.class_name}'s, so the file is of another model "
            "than it says"
        )
    if architecture.norm_offset and _NORM.fullmatch(name):
        return replace(place, change=_less(architecture.norm_offset))
    return place


def _find_place(architecture: Architecture, name: str) -> Place | None:
    if name in architecture.outer:
        return Place(architecture.outer[name])
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix, rest = f"model.layers.{layer[1]}.", layer[2]
    if rest in architecture.inner:
        found = architecture.inner[rest]
        return replace(found, name=f"{prefix}{found.name}")
    parameter = _PARAMETER.fullmatch(rest)
    if parameter is None or parameter[1] not in architecture.inner:
        return None
    found = architecture.inner[parameter[1]]
    return replace(found, name=f"{prefix}{found.name}.{parameter[2]}")


def _less(offset: float) -> Callable[[Floats], Floats]:
    return lambda values: values - np.float32(offset)
