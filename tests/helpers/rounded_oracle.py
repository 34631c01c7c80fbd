"""transformers with the rule of W8A8: rows are rounded to 8 bits where they meet a matrix of a layer."""

from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

_LARGEST = 127
_linear = torch.nn.functional.linear


def generate_rounded(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy answer to `prompt`. `model`: with the numbers that the codes of its layers stand for."""
    spans = _spans_of_layers(model)
    if any(hasattr(model.config, f"{name}_experts") for name in ("num", "num_local", "n_routed")):
        model.set_experts_implementation("eager")  # NOTE: the usual one multiplies all experts in one call of its own
    num_rounded = 0

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal num_rounded
        if not any(first <= weight.data_ptr() < end for first, end in spans):
            return _linear(x, weight, bias)
        num_rounded += 1
        scales = x.abs().amax(-1, keepdim=True) / _LARGEST
        integers = torch.where(scales > 0, x / scales, 0.0).round()
        product = _linear(integers, weight) * scales
        return product if bias is None else product + bias

    with patch.object(torch.nn.functional, "linear", linear):
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=-1,
        )
    assert num_rounded >= num_tokens * len(spans), "each matrix at each token, of a stack those of several experts"
    return list(ids[0, len(prompt) :].tolist())


def _spans_of_layers(model: PreTrainedModel) -> list[tuple[int, int]]:
    """First and last address of the matrices of layers, and stacks of them, without routers and convolutions."""
    others = (".gate.weight", ".router.weight", ".conv1d.weight")
    return [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for name, tensor in model.named_parameters()
        if ".layers." in name and tensor.dim() > 1 and not name.endswith(others)
    ]
