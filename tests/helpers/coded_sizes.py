"""Large checkpoints of codes, and what a process needs at its peak to load them."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD
from tandem.architecture.registry import find_family
from tests.helpers import checkpoints
from tests.helpers.published_formats import FORMATS, Encoder

# A format of each way in which codes, scales and orders lie in files.
KINDS = (
    *("fp8 blocks", "fp8 channels", "compressed fp8 tensors", "compressed int8 channels", "gptq 8 bits"),
    *("compressed int4 groups", "compressed int4 with zero points", "gptq", "gptq 2 in an order", "gptq 3 bits", "awq"),
    *("compressed mxfp4", "compressed mxfp8", "compressed nvfp4", "modelopt nvfp4", "bitsandbytes nf4"),
    "bitsandbytes nf4 nested",
)
LARGE = 2048  # hidden size: 240 million parameters
SMALL = 256
_SCRIPT = """
import sys, torch
from dataclasses import fields
from pathlib import Path
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.native.build import load_library
from tandem.models.loader import load_model

def peak_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

def load(path):
    parameters = load_model(path, device=torch.device("cpu"), kernels=kernels).decoder.parameters
    tensors = [*parameters.tensors.values()]
    for weight in parameters.weights.values():
        owner = getattr(weight, "coded", weight)
        tensors += [value for field in fields(owner) if isinstance(value := getattr(owner, field.name), torch.Tensor)]
    return tensors

kernels = NativeKernels(load_library()) if sys.argv[3] == "compiled" else TorchKernels()
load(sys.argv[1])
before = peak_bytes()
tensors = load(sys.argv[2])
sums = sum(tensor.view(torch.uint8)[..., :: 4096 // tensor.element_size()].sum().item() for tensor in tensors)
print(sum(tensor.nbytes for tensor in tensors), peak_bytes() - before)
"""


def save_codes(path: Path, name: str, hidden_size: int) -> Path:
    """A Llama in the format of that name. Matrices of one shape have the same codes."""
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 4,
        "head_dim": hidden_size // 4,
    }
    published, parts_of = FORMATS[name], cache(_parts)
    checkpoints.save_tiny_llama(path, dtype="bfloat16")
    checkpoints.edit_config(path, quantization_config=published.config, **sizes)
    fields = Fields(json.loads((path / "config.json").read_text()), str(path))
    tensors: dict[str, torch.Tensor] = {}
    for tensor in find_family(fields).read_model(fields).tensors():
        module = tensor.name.removesuffix(".weight")
        encode = published.encoder(module)
        if not tensor.is_weight or tensor.name == HEAD or encode is None:
            tensors[tensor.name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
            continue
        outputs, inputs = tensor.shape
        parts = parts_of(encode, outputs, inputs)
        tensors |= {f"{module}.{suffix}": part.clone() for suffix, part in parts.items()}
    return checkpoints.write_tensors(path, tensors)


def _parts(encode: Encoder, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    parts, _ = encode(np.random.default_rng(0), outputs, inputs)
    return {suffix: part.contiguous() for suffix, part in parts.items()}


def loading(small: Path, large: Path, *, is_native: bool) -> tuple[int, int]:
    """(bytes of the weights in memory, growth of the peak while `large` is loaded and every page of it is read)."""
    kernels = "compiled" if is_native else "pytorch"
    command = [sys.executable, "-c", _SCRIPT, str(small), str(large), kernels]
    weights, growth = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return weights, growth
