"""Recurrent layers on NVIDIA GPUs with Tandem's own Triton kernels: no bit of a request depends on how its prompt is
divided or what shares a step. Ran on an H200 (decision 116).
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional

from tandem.architecture.state import RecurrentSpec
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, RecurrentBatch, prepare_recurrent
from tandem.compute.step import AttentionBatch

KERNELS = "tandem.compute.cuda.triton_recurrent"  # imported when first used, since it needs triton
MAX_COLUMNS = 256  # of a head's matrix
TILE_ROWS, TILE_CHANNELS = 16, 256  # that one program computes
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class TritonRecurrentBatch(RecurrentBatch):
    """A `RecurrentBatch` whose convolution is computed by two kernels."""

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
        kernels = importlib.import_module(KERNELS)
        x, (taps, channels), columns = x.contiguous(), weight.shape, state.columns
        assert columns.stride()[1:] == (channels, 1), columns.stride()
        assert columns.dtype == x.dtype, (columns.dtype, x.dtype)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        tiles = -(-channels // TILE_CHANNELS)
        before = {
            "read_pages": self.read_pages[:, state.columns_page].contiguous(),
            "is_first": self.is_first.view(torch.int8),
            "num_requests": len(self.read_pages),
            "x_stride": x.stride(0),
            "page_stride": columns.stride(0),
            "NUM_CHANNELS": channels,
            "TILE": TILE_CHANNELS,
            **_OPTIONS,
        }
        kernels.convolve_kernel[(len(x), tiles)](
            out, x, columns, weight, weight if bias is None else bias, self.tap_rows, TAPS=taps,
            HAS_BIAS=bias is not None, **before,
        )  # fmt: skip
        if self.column_rows.numel():
            after = torch.empty(*self.column_rows.shape, channels, dtype=x.dtype, device=x.device)
            kernels.columns_kernel[(self.column_rows.numel(), tiles)](
                after, x, columns, self.column_rows, NUM_COLUMNS=taps - 1, **before
            )
            state.write_columns(self.write_pages, after)
        return (functional.silu(out) if has_activation else out).to(x.dtype)


class TritonRecurrentBackend:
    """Implements `RecurrentBackend`: one program for a request, a head and some rows of its matrix."""

    name = "triton"
    graph_safe = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def refuses(self, spec: RecurrentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why the kernels cannot serve such a layer; None = they can. Needs triton and a GPU. Softcaps and sinks
        do not apply to recurrent states.
        """
        if (reason := TritonKernels.missing(self._device)) is not None:
            return reason
        if spec.heads and spec.heads[2] > MAX_COLUMNS:
            return f"{spec}: its matrices have more than {MAX_COLUMNS} columns"
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerRecurrent, layers: Collection[Any]) -> RecurrentBatch:
        found = prepare_recurrent(batch, kv)
        return TritonRecurrentBatch(**{field.name: getattr(found, field.name) for field in fields(found)})

    def recur(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, state: LayerRecurrent, batch: RecurrentBatch
    ) -> torch.Tensor:
        """See `RecurrentBackend.recur`."""
        matrices = state.matrices
        assert matrices is not None
        (_, per_page, rows, columns), num_heads = matrices.shape, len(state.head_pages)
        assert matrices.stride()[1:] == (rows * columns, columns, 1), matrices.stride()
        assert inputs.b is not None or inputs.a.dim() == 2, "a step of each column is no number of a head"
        out = torch.empty(inputs.v.shape, dtype=torch.float32, device=inputs.v.device)
        tile_columns = 1 << (columns - 1).bit_length()
        importlib.import_module(KERNELS).recur_kernel[(len(batch.read_pages), num_heads, -(-rows // TILE_ROWS))](
            out,
            *(each.contiguous() for each in (inputs.q, inputs.k, inputs.v, inputs.a)),
            inputs.a if inputs.b is None else inputs.b.contiguous(),
            params.a_log.contiguous(),
            params.a_bias.contiguous(),
            matrices,
            batch.read_pages,
            batch.is_first.view(torch.int8),
            batch.query_start,
            batch.first_write,
            batch.write_pages,
            batch.write_ends,
            matrices.stride(0),
            state.first_head,
            NUM_PAGES=state.num_pages,
            HEADS_PER_PAGE=per_page,
            NUM_HEADS=num_heads,
            NUM_GROUPS=inputs.q.shape[1],
            ROWS=rows,
            COLUMNS=columns,
            BY_COLUMN=inputs.a.dim() == 3,
            BY_RATE=params.a_log.dim() == 2,
            IS_DELTA=inputs.b is not None,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=tile_columns,
            **_OPTIONS,
        )
        return out
