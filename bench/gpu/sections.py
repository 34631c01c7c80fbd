"""The sections of a run and the parts they consist of, each with the seconds it may take on a large GPU.

A part's module is imported only in the part's own process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bench.gpu.machine import stand_in_for_missing

SECTIONS = ("checks", "triton", "decode", "prefill", "batched", "handoff", "graphs")
MODELS = ("qwen3-8b", "llama-3.1-8b")


@dataclass(frozen=True, slots=True)
class Part:
    """`name`: what comes after the section's; `model`: None = of none. `function`: `module:function`."""

    section: str
    name: str
    function: str
    limit_s: float
    model: str | None = None

    @property
    def label(self) -> str:
        return "/".join(filter(None, (self.section, self.name, self.model)))

    def load(self) -> Callable[..., Any]:
        """Function that runs it: `(setting, results)`, and the model's name where it has one."""
        stand_in_for_missing()
        module, _, function = self.function.partition(":")
        found: Callable[..., Any] = getattr(import_module(f"bench.gpu.{module}"), function)
        return found


_CHECKS = (
    Part("checks", "attention", "attention_checks:run", 240),
    Part("checks", "model", "model_checks:run", 120),
    Part("checks", "sampling", "sampling_checks:run", 60),
    Part("checks", "memory", "memory_checks:run", 60),
)
_TRITON = (
    Part("triton", "checks", "triton_checks:run", 180),
    Part("triton", "products", "triton_times:products", 120),
    Part("triton", "experts", "triton_times:experts", 60),
    Part("triton", "latents", "triton_times:latents", 60),
    Part("triton", "recurrence", "triton_times:recurrence", 40),
)
_BY_MODEL = (
    ("decode", "", "decode:run", 150.0, MODELS),
    ("prefill", "", "prefill:run", 90.0, MODELS),
    ("batched", "tandem", "batched:run_tandem", 90.0, MODELS[:1]),
    ("batched", "transformers", "batched:run_transformers", 240.0, MODELS[:1]),
    ("handoff", "", "handoff:run", 150.0, MODELS[:1]),
    ("graphs", "", "graphs:run", 120.0, MODELS[:1]),
)


def plan(sections: Sequence[str], models: Sequence[str]) -> list[Part]:
    """The parts of these sections in their fixed order; `models`: those wanted, empty = each section's own choice."""
    parts = [part for part in (*_CHECKS, *_TRITON) if part.section in sections]
    for section, name, function, limit_s, usual in _BY_MODEL:
        if section in sections:
            parts += [Part(section, name, function, limit_s, model) for model in models or usual]
    return parts


def find(label: str) -> Part:
    """The part of that label."""
    return next(part for part in plan(SECTIONS, MODELS) if part.label == label)
