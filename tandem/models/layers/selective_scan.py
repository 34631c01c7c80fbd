"""Mamba's mixer: a recurrence of each channel with its own state, whose terms (steps, keys and queries) are computed
from all channels.
"""

from typing import ClassVar

import torch

from tandem.architecture.recurrent_mixers import SelectiveScanSpec
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.ops import Kernels
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, RecurrentBackend, RecurrentBatch
from tandem.models.layers.norm import Norm
from tandem.models.layers.recurrent import CausalConv, ProjectsOut
from tandem.models.layers.rotary import RotaryTable
from tandem.models.parameters import Parameters


class SelectiveScan(ProjectsOut):
    """`Mixer` that computes a `SelectiveScanSpec` with the tensors that it names."""

    params: ClassVar[str] = "selective scan"

    def __init__(self, spec: SelectiveScanSpec, parameters: Parameters, rotary: RotaryTable, kernels: Kernels) -> None:
        self._kernels = kernels
        self._x, self._gate = parameters.linear(spec.x), parameters.linear(spec.gate)
        self._terms, self._steps = parameters.linear(spec.terms), parameters.linear(spec.steps)
        self._out = parameters.linear(spec.out)
        self._conv = CausalConv(spec.conv, parameters)
        self._widths = [spec.steps.inputs, spec.state_dim, spec.state_dim]
        self._norms = [Norm.take(norm, parameters, kernels) for norm in spec.norms]
        a_log, a_bias, self._skip = (
            parameters.tensors[tensor.name].float() for tensor in (spec.a_log, spec.a_bias, spec.skip)
        )
        self._constants = RecurrenceParams(a_log, a_bias)

    def write(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        state: LayerRecurrent,
        batch: RecurrentBatch,
        backend: RecurrentBackend,
    ) -> torch.Tensor:
        """Updates `state` by the tokens of `x` [num_tokens, hidden]. Returns gated channels [num_tokens, channels]."""
        unmixed = self._x(x)
        mixed = self._conv(unmixed, state, batch)
        parts = torch.split(self._terms(mixed), self._widths, dim=1)
        step, k, q = (norm(part.contiguous()) for norm, part in zip(self._norms, parts, strict=True))
        inputs = RecurrenceInputs(q.unsqueeze(1), k.unsqueeze(1), mixed.unsqueeze(2), self._steps(step), None)
        batch.note_drafts(state, unmixed, (inputs, self._constants))
        y = backend.recur(inputs, self._constants, state, batch).squeeze(2)
        y = y.add_(mixed.float().mul_(self._skip))
        return self._kernels.gated_product(self._gate(x).float(), y, "silu").to(x.dtype)
