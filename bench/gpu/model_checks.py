"""The decoder's arithmetic and whole engines on the device, beside the same on the CPU.

In float32 a whole engine's greedy tokens must be equal, with graphs and without; in bfloat16, where rounding decides
between near-ties, the prompts' log-probabilities must be close to those of float32.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.models import RandomModel, fields_of, random_parameters, spec_of
from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Limits, Stack, build, serve
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams

CPU = Setting(is_dry=True)
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 1024}
WIDE = 0.06  # spread of the weights: logits are far from flat, so that near-ties are rare
TINY_WIDE = 0.3
MAX_LEN = 512
BACKENDS = ("triton", "varlen", "flashinfer", "reference")
LOGPROB_TOLERANCE = 0.05  # mean; bfloat16 through four layers
RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def run(setting: Setting, results: SectionResults) -> None:
    """Kernels, then engines of both families with every backend that serves here."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, compute in KERNEL_CASES.items():
            with results.guarded(f"{name} {dtype}"):
                results.check(check_kernel(setting, name, compute, dtype))
    for name in ("qwen3-8b", "llama-3.1-8b"):
        for backend in BACKENDS[-1:] if setting.is_dry else BACKENDS:
            with results.guarded(f"small {name}, {backend}"):
                _check_engine(replace(setting, backend=backend), results, name)


Tensors = dict[str, torch.Tensor]


def _tensors(dtype: torch.dtype) -> Tensors:
    """Inputs on the CPU in float64, exact in `dtype`."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (37, 512), "w": (768, 512), "w2": (768, 512), "norm": (512,), "head_norm": (64,)}
    shapes |= {"q": (37, 8, 64), "k": (37, 2, 64), "v": (37, 2, 64), "residual": (37, 512)}
    found = {name: torch.randn(*shape, generator=generator).to(dtype).double() for name, shape in shapes.items()}
    angles = torch.outer(torch.arange(128, dtype=torch.float64), torch.logspace(0, -4, 32, dtype=torch.float64))
    order = torch.randperm(96, generator=generator)[:37]
    return found | {"cos": angles.cos().float(), "sin": angles.sin().float(), "slots": order, "positions": order}


def _linear(kernels: TorchKernels, t: Tensors) -> torch.Tensor:
    return kernels.linear(t["x"], t["w"])


def _gated(kernels: TorchKernels, t: Tensors) -> torch.Tensor:
    return kernels.gated_linear(t["x"], t["w"], t["w2"], "silu")


def _norm(kernels: TorchKernels, t: Tensors) -> torch.Tensor:
    residual = t["residual"].clone()
    return torch.cat([kernels.rms_norm(t["x"], t["norm"], 1e-6, residual=residual), residual])


def _rope(kernels: TorchKernels, t: Tensors) -> torch.Tensor:
    """Rotated queries, and what lies in the cache; one token has no slot."""
    q, k = t["q"].clone(), t["k"].clone()
    caches = [torch.zeros(7, 2, 16, 64, dtype=q.dtype, device=q.device) for _ in range(2)]
    slots = t["slots"] + 16  # past the null block
    slots[3] = -1
    norms: dict[str, Any] = {"q_norm": t["head_norm"], "k_norm": t["head_norm"]}
    kernels.rope_and_write(q, k, t["v"], t["cos"], t["sin"], t["positions"], slots, caches[0], caches[1], **norms)
    return torch.cat([q.flatten(), caches[0][1:].flatten(), caches[1][1:].flatten()])


KERNEL_CASES: dict[str, Callable[[TorchKernels, Tensors], torch.Tensor]] = {
    "linear": _linear,
    "gated_linear": _gated,
    "rms_norm": _norm,
    "rope_and_write": _rope,
}


@torch.inference_mode()
def check_kernel(
    setting: Setting, name: str, compute: Callable[[TorchKernels, Tensors], torch.Tensor], dtype: torch.dtype
) -> Check:
    """By the norm of the difference from the CPU in float32, over that of the result."""
    inputs = _tensors(dtype)

    def on(device: torch.device, kind: torch.dtype) -> torch.Tensor:
        moved = {
            key: tensor.to(device, kind if tensor.dtype == torch.float64 else tensor.dtype)
            for key, tensor in inputs.items()
        }
        return compute(TorchKernels(), moved).double().cpu()

    expected, found = on(torch.device("cpu"), torch.float32), on(setting.device, dtype)
    error = ((found - expected).norm() / expected.norm()).item()
    return Check(name, str(dtype), error <= RELATIVE_TOLERANCE[dtype], f"relative error {error:.1e}")


def small_model(setting: Setting, name: str, dtype: str, *, is_tiny: bool) -> RandomModel:
    """The same weights on every device; bfloat16 ones are exact in float32 too."""
    fields = fields_of(name, is_dry=True) | SMALL | (TINY if is_tiny else {})
    spec = spec_of(fields, MAX_LEN, dtype, f"small {name}")
    plain = random_parameters(spec_of(fields, MAX_LEN, "float32", ""), CPU.device, TINY_WIDE if is_tiny else WIDE)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    parameters = {key: tensor.bfloat16().to(kind).to(setting.device) for key, tensor in plain.items()}
    return RandomModel(name, spec, parameters)


def _limits(uses_graphs: bool) -> Limits:
    return Limits(MAX_LEN, 8, 64, 64 << 20, uses_graphs)


def _check_engine(setting: Setting, results: SectionResults, name: str) -> None:
    num_prompts, num_new = setting.pick(6, 3), setting.pick(24, 4)
    prompts = [[(31 * index + 7 * place) % 1000 for place in range(5 + 40 * index)] for index in range(num_prompts)]
    for dtype in ("float32", "bfloat16"):
        try:
            stacks = {
                label: build(setting, small_model(setting, name, dtype, is_tiny=setting.is_dry), _limits(uses_graphs))
                for label, uses_graphs in {"graphs": True, "eager": False}.items()
            }
        except ConfigurationError as refusal:
            results.check(Check(f"small {name}", f"{setting.backend} {dtype}", True, f"refused: {refusal}"))
            continue
        plain = build(CPU, small_model(CPU, name, "float32", is_tiny=setting.is_dry), _limits(False))
        for label, stack in stacks.items():
            case = f"{setting.backend} {dtype} {label}"
            if dtype == "float32":
                same = serve(stack, prompts, num_new, 4) == serve(plain, prompts, num_new, 4)
                results.check(Check(f"small {name}, tokens", case, same, "equal to the CPU's" if same else "DIFFER"))
            found, expected = prompt_logprobs(stack, prompts[-1]), prompt_logprobs(plain, prompts[-1])
            error = (found - expected).abs().mean().item()
            passed = error <= (LOGPROB_TOLERANCE if dtype == "bfloat16" else 1e-4)
            results.check(Check(f"small {name}, logprobs", case, passed, f"mean error {error:.1e}"))


def prompt_logprobs(stack: Stack, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities of each prompt token after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    stack.engine.add_request(prompt, params)
    while stack.engine.has_work:
        for output in stack.engine.step():
            if output.prompt_logprobs is not None:
                return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])
    raise AssertionError("no prompt logprobs came")
