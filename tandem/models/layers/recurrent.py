"""Token mixers with a recurrent state: project, convolve, update the state token by token, gate, project back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from tandem.architecture.recurrent_mixers import ConvSpec, Gating, LinearRecurrenceSpec, ShortConvSpec
from tandem.architecture.tensors import LinearSpec
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.ops import Kernels
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, RecurrentBackend, RecurrentBatch
from tandem.compute.step import Choices
from tandem.compute.weights.base import Linear
from tandem.models.layers.norm import Norm
from tandem.models.layers.rotary import RotaryTable
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters

_LENGTH_EPS = 1e-6  # of the square of a query's or key's length


class CausalConv:
    """Computes a `ConvSpec` with the tensors that it names."""

    def __init__(self, spec: ConvSpec, parameters: Parameters) -> None:
        self._spec = spec
        weights = torch.cat([parameters.tensors[weight.name] for weight in spec.weights])
        self._weight = weights.squeeze(1).T.float().contiguous()  # [taps, channels]
        biases = [parameters.tensors[bias.name] for bias in spec.all_biases]
        self._bias = torch.cat(biases).float() if biases else None

    def __call__(self, x: torch.Tensor, state: LayerRecurrent, batch: RecurrentBatch) -> torch.Tensor:
        """`x` [num_tokens, channels] -> the same shape and dtype; updates `state`, see `RecurrentBatch.convolve`."""
        return batch.convolve(x, self._weight, self._bias, state, has_activation=self._spec.activation)


class ProjectsOut:
    """Base of mixers whose `write` already computes the recurrence, so that `attend` is only the output projection."""

    _out: Linear

    def attend(
        self,
        channels: torch.Tensor,
        state: LayerRecurrent,
        batch: RecurrentBatch,
        backend: RecurrentBackend,
        choices: Choices,
    ) -> torch.Tensor:
        """[num_tokens, channels] -> [num_tokens, hidden]."""
        return self._out(channels)


class ShortConv(ProjectsOut):
    """`Mixer` that computes a `ShortConvSpec` with the tensors that it names."""

    params: ClassVar[str] = "convolution"

    def __init__(self, spec: ShortConvSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._project = [parameters.linear(linear) for linear in spec.parts or (spec.project,)]
        self._conv = CausalConv(spec.conv, parameters)
        self._out = parameters.linear(spec.out)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        state: LayerRecurrent,
        batch: RecurrentBatch,
        backend: RecurrentBackend,
    ) -> torch.Tensor:
        """Convolves `x` [num_tokens, hidden] and updates `state`. Returns the gated channels [num_tokens, channels]."""
        parts = [linear(x) for linear in self._project]
        b, c, x = parts[0].chunk(3, dim=1) if len(parts) == 1 else parts
        x = b * x
        batch.note_drafts(state, x)
        return self._conv(x, state, batch).mul_(c)


class LinearRecurrence(ProjectsOut):
    """`Mixer` that computes a `LinearRecurrenceSpec` with the tensors that it names."""

    params: ClassVar[str] = "recurrence"

    def __init__(
        self, spec: LinearRecurrenceSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._qkv = [parameters.linear(linear) for linear in spec.qkv]
        self._gate = _linear(parameters, spec.gate_in, spec.gate)
        self._a = _linear(parameters, spec.a_in, spec.a)
        self._b = None if spec.b is None else parameters.linear(spec.b)
        self._conv = CausalConv(spec.conv, parameters)
        a_bias = parameters.tensors[spec.a_bias.name].float()
        self._has_columns = spec.a.outputs > spec.num_heads
        self._constants = RecurrenceParams(
            parameters.tensors[spec.a_log.name].float().flatten(),
            a_bias.view(spec.num_heads, spec.key_dim) if self._has_columns else a_bias,
        )
        self._skip = None if spec.skip is None else parameters.tensors[spec.skip.name].float()
        self._normed = _output_norm(spec, parameters, kernels)
        self._out = parameters.linear(spec.out)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        state: LayerRecurrent,
        batch: RecurrentBatch,
        backend: RecurrentBackend,
    ) -> torch.Tensor:
        """Updates `state` by the tokens of `x` [num_tokens, hidden]. Returns gated values, one row per token with the
        `value_dim` values of each head.
        """
        spec = self._spec
        parts = [linear(x) for linear in self._qkv]
        unmixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        mixed = self._conv(unmixed, state, batch)
        keys, values = spec.num_groups * spec.key_dim, spec.num_heads * spec.value_dim
        widths = [values if part == "v" else keys for part in spec.conv_order]
        split = torch.split(mixed, widths, dim=1)
        found = dict(zip(spec.conv_order, split, strict=True))
        q, k = (found[part].reshape(-1, spec.num_groups, spec.key_dim) for part in "qk")
        v = found["v"].reshape(-1, spec.num_heads, spec.value_dim)
        if spec.are_normed:
            q, k = self._unit(q, spec.key_dim**-0.5), self._unit(k, 1.0)
        a = self._a(x)
        a = a.view(-1, spec.num_heads, spec.key_dim) if self._has_columns else a
        inputs = RecurrenceInputs(q, k, v, a, None if self._b is None else self._b(x))
        batch.note_drafts(state, unmixed, (inputs, self._constants))
        out = backend.recur(inputs, self._constants, state, batch)
        if self._skip is not None:
            out = out.add_(v.float().mul_(self._skip[:, None]))
        return self._gated(out.flatten(1), self._gate(x).float()).to(x.dtype)

    def _unit(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """Each row of the last dimension divided by its length, times `scale`, in float32."""
        size = x.shape[-1]
        weight = torch.full((size,), scale * size**-0.5, device=x.device)
        return self._kernels.rms_norm(x.float(), weight, _LENGTH_EPS / size)

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Applies gate and norm to y; `y` and `gate` are [num_tokens, num_heads * value_dim] float32."""
        match self._spec.gating:
            case Gating.GATE:
                return self._kernels.gated_product(gate, y, "silu")
            case Gating.GATE_THEN_NORM:
                return self._normed(self._kernels.gated_product(gate, y, "silu"))
            case Gating.NORM_THEN_GATE | Gating.GROUPS_THEN_GATE:
                return self._kernels.gated_product(gate, self._normed(y), "silu")
            case Gating.NORM_THEN_SIGMOID:
                return self._normed(y).mul_(rowwise_sigmoid(gate))


def _output_norm(
    spec: LinearRecurrenceSpec, parameters: Parameters, kernels: Kernels
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm of y [num_tokens, num_heads * value_dim] float32, of this rank's heads; the identity without a norm."""
    if spec.out_norm is None:
        return lambda y: y
    norm = Norm.take(spec.out_norm, parameters, kernels)
    weight, within = norm.weight.float(), norm.spec.within
    if within is None:
        return _GroupNorm(
            weight, norm.spec.eps, spec.num_heads if spec.gating.is_by_head else spec.num_norm_groups, kernels
        )
    first, end = within
    num_groups, rest = divmod(spec.num_norm_groups * (end - first), norm.spec.size)
    if not rest:
        return _GroupNorm(weight[first:end].contiguous(), norm.spec.eps, num_groups, kernels)
    whole = _GroupNorm(weight, norm.spec.eps, spec.num_norm_groups, kernels)
    return parameters.over_ranks(whole, norm.spec.size, within)


@dataclass(frozen=True, slots=True)
class _GroupNorm:
    """Norm of each of `num_groups` parts of a row separately. Its weight is that of one part, or of the whole row."""

    weight: torch.Tensor
    eps: float
    num_groups: int
    kernels: Kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(-1, self.num_groups, x.shape[1] // self.num_groups)
        if len(self.weight) == parts.shape[2]:
            return self.kernels.rms_norm(parts, self.weight, self.eps).flatten(1)
        ones = torch.ones(parts.shape[2], device=x.device)
        return self.kernels.rms_norm(parts, ones, self.eps).flatten(1).mul_(self.weight)


def _linear(
    parameters: Parameters, first: LinearSpec | None, last: LinearSpec
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`last(first(x))`, or `last(x)` if there is no `first`."""
    outer = parameters.linear(last)
    if first is None:
        return outer
    inner = parameters.linear(first)
    return lambda x: outer(inner(x))
