"""Choice of each token's experts from a router's logits, as one compiled call, for the rules that it supports."""

from collections.abc import Callable

import torch

from tandem.architecture.feed_forward import RouterSpec
from tandem.architecture.tensors import TensorSpec
from tandem.compute.native.codes import DTYPE_CODES, SCORE_CODES

CHOICE_FIELDS = """
    dtype logits stride correction expert_scales logit_scale:d epsilon:d scale:d score renormalise rounding
    num_groups top_groups best_of_group n num_experts top_k weights chosen threads
"""
_MOST_OF_GROUP = 2


def _serves(spec: RouterSpec, correction: torch.Tensor | None, expert_scales: torch.Tensor | None) -> bool:
    """Whether the compiled function supports the rule of `spec`, without its norm, which is applied before.

    NOTE: the spec is compared with one made from the fields that the call supports, so all other fields must be
    defaults.
    """
    known = RouterSpec(
        linear=spec.linear,
        top_k=spec.top_k,
        score=spec.score,
        norm=spec.norm,
        logit_scale=spec.logit_scale,
        correction=spec.correction,
        expert_scales=spec.expert_scales,
        renormalise=spec.renormalise,
        epsilon=spec.epsilon,
        scale=spec.scale,
        rounded=spec.rounded,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        best_of_group=spec.best_of_group,
    )
    return (
        spec == known
        and spec.score in SCORE_CODES
        and 1 <= spec.best_of_group <= _MOST_OF_GROUP
        and _is_native(correction, spec.correction)
        and _is_native(expert_scales, spec.expert_scales)
    )


def _is_native(tensor: torch.Tensor | None, spec: TensorSpec | None) -> bool:
    if tensor is None or spec is None:
        return tensor is None and spec is None
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


class NativeExpertChoice:
    """Implements `ExpertChoice` with the compiled function.

    Args:
        call: the compiled function.
        spec, correction, expert_scales: a rule for which `_serves` is true.
    """

    def __init__(
        self,
        call: Callable[..., None],
        spec: RouterSpec,
        correction: torch.Tensor | None,
        expert_scales: torch.Tensor | None,
    ) -> None:
        self._call = call
        self._spec = spec
        self._correction = correction
        self._expert_scales = expert_scales

    @classmethod
    def build(
        cls,
        call: Callable[..., None],
        spec: RouterSpec,
        correction: torch.Tensor | None,
        expert_scales: torch.Tensor | None,
    ) -> "NativeExpertChoice | None":
        """The choice by the rule of `spec`; None = the compiled function does not support it."""
        return cls(call, spec, correction, expert_scales) if _serves(spec, correction, expert_scales) else None

    def __call__(self, logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tandem.compute.ops.ExpertChoice`."""
        spec, (num_tokens, num_experts) = self._spec, logits.shape
        weights = torch.empty(num_tokens, spec.top_k, dtype=torch.float32)
        chosen = torch.empty(num_tokens, spec.top_k, dtype=torch.int64)
        assert num_experts == spec.num_experts
        assert logits.stride(1) == 1
        assert self._correction is None or self._correction.shape == (num_experts,)
        assert self._expert_scales is None or self._expert_scales.shape == (num_experts,)
        given = DTYPE_CODES[logits.dtype], logits.data_ptr(), logits.stride(0)
        out = weights.data_ptr(), chosen.data_ptr()
        self._call(*self.fields(dtype, *given, num_tokens, *out, torch.get_num_threads()))
        return weights, chosen

    def fields(
        self,
        rounding: torch.dtype,
        dtype: int = 0,
        logits: int = 0,
        stride: int = 0,
        num_tokens: int = 0,
        weights: int = 0,
        chosen: int = 0,
        threads: int = 0,
    ) -> tuple[int | float, ...]:
        """Fields of the C++ struct, in order; with default arguments, those that are equal for all calls."""
        spec = self._spec
        return (
            dtype,
            logits,
            stride,
            0 if self._correction is None else self._correction.data_ptr(),
            0 if self._expert_scales is None else self._expert_scales.data_ptr(),
            spec.logit_scale,
            spec.epsilon,
            spec.scale,
            SCORE_CODES[spec.score],
            spec.renormalise,
            DTYPE_CODES[rounding if spec.rounded else torch.float32],
            spec.num_groups,
            spec.top_groups,
            spec.best_of_group,
            num_tokens,
            spec.num_experts,
            spec.top_k,
            weights,
            chosen,
            threads,
        )
