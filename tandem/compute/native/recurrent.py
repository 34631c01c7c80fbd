"""Compiled convolution and recurrence on the CPU, token by token: no bit depends on how a prompt is divided or what
shares a step.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch

from tandem.architecture.state import RecurrentSpec
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.compute.native.codes import DTYPE_CODES
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, RecurrentBatch, prepare_recurrent
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError

CONVOLVE_FIELDS = "dtype rows tap_rows weight bias out num_tokens taps channels has_activation threads"
RECUR_FIELDS = """
    q k v a b a_log a_bias matrices page_stride read_pages is_first query_start first_write write_pages write_ends
    out num_requests num_heads num_groups rows columns has_columns has_rates num_pages heads_per_page first_head threads
"""


@dataclass(frozen=True, slots=True)
class NativeRecurrentBatch(RecurrentBatch):
    """A `RecurrentBatch` whose convolution is compiled."""

    compiled_convolve: Callable[..., None]

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: LayerRecurrent,
        *,
        has_activation: bool,
    ) -> torch.Tensor:
        """See `RecurrentBatch.convolve`."""
        rows, (taps, channels) = self.with_columns(x, state), weight.shape
        assert rows.is_contiguous()
        assert rows.shape[1] == channels
        assert self.tap_rows.shape == (len(x), taps)
        assert self.tap_rows.is_contiguous()
        assert weight.is_contiguous()
        assert weight.dtype == torch.float32
        assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32)
        out = torch.empty(x.shape, dtype=x.dtype)
        self.compiled_convolve(
            DTYPE_CODES[rows.dtype],
            *(each.data_ptr() for each in (rows, self.tap_rows, weight)),
            0 if bias is None else bias.data_ptr(),
            *(out.data_ptr(), len(x), taps, channels, has_activation, torch.get_num_threads()),
        )
        self.keep_columns(rows, state)
        return out


class NativeRecurrentBackend:
    """Implements `RecurrentBackend` for every spec on the CPU, if the kernels can be compiled."""

    name = "native"
    graph_safe = False

    def __init__(self, device: torch.device) -> None:
        self._reason: str | None = None
        if device.type != "cpu":
            self._reason = f"it computes on the CPU, not on {device.type}"
            return
        try:
            self._recur = bind(load_library(), "tandem_recur", RECUR_FIELDS)
            self._convolve = bind(load_library(), "tandem_convolve", CONVOLVE_FIELDS)
        except ConfigurationError as error:
            self._reason = str(error)

    def refuses(self, spec: RecurrentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """The reason if the kernels are missing, else None; softcaps and sinks do not apply to recurrent states."""
        return self._reason

    def prepare(self, batch: AttentionBatch, kv: LayerRecurrent, layers: Collection[Any]) -> RecurrentBatch:
        found = prepare_recurrent(batch, kv)
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        return NativeRecurrentBatch(**values, compiled_convolve=self._convolve)

    def recur(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, state: LayerRecurrent, batch: RecurrentBatch
    ) -> torch.Tensor:
        """See `RecurrentBackend.recur`."""
        matrices = state.matrices
        assert matrices is not None
        (_, per_page, rows, columns), num_heads = matrices.shape, len(state.head_pages)
        assert matrices.stride()[1:] == (rows * columns, columns, 1)
        q, k, v, a = (_numbers(x) for x in (inputs.q, inputs.k, inputs.v, inputs.a))
        b = None if inputs.b is None else _numbers(inputs.b)
        a_log, a_bias = _numbers(params.a_log), _numbers(params.a_bias)
        num_groups = q.shape[1]
        assert q.shape == k.shape == (len(v), num_groups, columns)
        assert v.shape[1:] == (num_heads, rows)
        has_columns = a.dim() == 3
        assert a.shape[1:] == a_bias.shape == ((num_heads, columns) if has_columns else (num_heads,))
        assert b is not None or not has_columns, "a step of each column is no number of a head"
        has_rates = a_log.dim() == 2
        assert a_log.shape == ((num_heads, columns) if has_rates else (num_heads,))
        assert not (has_columns and has_rates)
        assert b is None or not has_rates
        assert all(x.is_contiguous() for x in (batch.read_pages, batch.write_pages, batch.is_first, batch.query_start))
        out = torch.empty_like(v)
        self._recur(
            *(x.data_ptr() for x in (q, k, v, a)),
            0 if b is None else b.data_ptr(),
            a_log.data_ptr(),
            a_bias.data_ptr(),
            matrices.data_ptr(),
            matrices.stride(0),
            *(x.data_ptr() for x in (batch.read_pages, batch.is_first, batch.query_start)),
            *(x.data_ptr() for x in (batch.first_write, batch.write_pages, batch.write_ends)),
            out.data_ptr(),
            len(batch.read_pages),
            num_heads,
            num_groups,
            rows,
            columns,
            has_columns,
            has_rates,
            state.num_pages,
            per_page,
            state.first_head,
            torch.get_num_threads(),
        )
        return out


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, contiguous; exact."""
    return x.float().contiguous()
