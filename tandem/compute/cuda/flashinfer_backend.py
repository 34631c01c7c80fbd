"""Attention backend on NVIDIA GPUs that uses FlashInfer, if it is installed.

Its kernels need plans made on the host for each batch, so it cannot be captured in a CUDA graph. Decodes go through the
prefill wrapper as one-token chunks. Blocks before a window are left out of a plan and never read. Not yet exercised on
a GPU.
"""

import importlib.util
import inspect
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch

HEAD_DIMS = (64, 128, 256)  # those that it has kernels for
MIN_CAPABILITY = (8, 0)  # compute capability of the GPU
WORKSPACE_BYTES = 128 * 2**20  # for partial results, shared by all plans


@dataclass(frozen=True, slots=True)
class PagedIndices:
    """Block tables of a batch in FlashInfer's form: concatenated, without blocks that no query sees."""

    indptr: torch.Tensor  # [num_requests + 1] int32
    indices: torch.Tensor  # [indptr[-1]] int32
    last_page_len: torch.Tensor  # [num_requests] int32, tokens in the last block, 1 to block_size

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, window: int | None) -> "PagedIndices":
        """The tables of `batch`. Masks stay right without the first blocks, since distances between query and key are
        the same.
        """
        ends = (batch.seq_lens + block_size - 1) // block_size
        starts = torch.zeros_like(ends)
        if window is not None:
            first_position = batch.seq_lens - batch.query_start.diff()
            starts = (first_position - window + 1).clamp(min=0) // block_size
        columns = torch.arange(batch.block_tables.shape[1], device=ends.device)[None, :]
        used = (columns >= starts[:, None]) & (columns < ends[:, None])
        indptr = torch.zeros(batch.num_requests + 1, dtype=torch.int32, device=ends.device)
        indptr[1:] = (ends - starts).cumsum(0)
        return cls(indptr, batch.block_tables[used], (batch.seq_lens - 1) % block_size + 1)


@dataclass(frozen=True, eq=False)
class _Plan:
    """A plan with its FlashInfer wrapper, reserved until the batch is dropped."""

    wrapper: Any


@dataclass(frozen=True, slots=True)
class PlannedBatch(AttentionBatch):
    """A batch with the plans of the layers that attend with it."""

    plans: Mapping[AttentionParams, _Plan]


class FlashInferBackend:
    """Implements `AttentionBackend` with FlashInfer's FA2 kernels, over head-major pages.

    Args:
        device: device of the KV cache.
    """

    name = "flashinfer"
    graph_safe = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace: torch.Tensor | None = None
        self._wrappers: list[tuple[Any, weakref.ref[_Plan]]] = []  # each with the last plan that was made in it

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why FlashInfer cannot serve such a layer; None = it can. Soft-capping and windows are served."""
        if sinks:
            return "it has no attention sinks"
        if self._device.type != "cuda":
            return f"device {self._device} is not CUDA"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed; pip install flashinfer-python"
        if spec.dtype not in ("bfloat16", "float16"):
            return f"dtype {spec.dtype} is neither bfloat16 nor float16"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim={spec.head_dim} is not one of {HEAD_DIMS}"
        capability = torch.cuda.get_device_capability(self._device)
        if capability < MIN_CAPABILITY:
            return f"compute capability {capability} is below {MIN_CAPABILITY}"
        if "disable_split_kv" not in inspect.signature(_wrapper_class().plan).parameters:
            return "this flashinfer cannot plan without split KV; upgrade flashinfer-python"
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> PlannedBatch:
        """Adds a plan for each of `layers` to the batch."""
        plans = {params: self._plan(batch, kv.keys, params) for params in layers}
        return PlannedBatch(**{field.name: getattr(batch, field.name) for field in fields(AttentionBatch)}, plans=plans)

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype."""
        assert isinstance(batch, PlannedBatch)
        out: torch.Tensor = batch.plans[params].wrapper.run(queries, (kv.keys, kv.values))
        return out

    def _plan(self, batch: AttentionBatch, keys: torch.Tensor, params: AttentionParams) -> _Plan:
        _, num_kv_heads, block_size, head_dim = keys.shape
        pages = PagedIndices.of(batch, block_size, params.window)
        wrapper = self._take_wrapper()
        wrapper.plan(
            batch.query_start,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            params.num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=params.scale,
            window_left=-1 if params.window is None else params.window - 1,
            logits_soft_cap=params.softcap,
            q_data_type=keys.dtype,
            kv_data_type=keys.dtype,
            disable_split_kv=True,  # a split would depend on the batch
        )
        plan = _Plan(wrapper)
        self._wrappers.append((wrapper, weakref.ref(plan)))
        return plan

    def _take_wrapper(self) -> Any:
        """A wrapper whose plan was dropped, or a new one: never one that a batch still needs."""
        for index, (wrapper, plan) in enumerate(self._wrappers):
            if plan() is None:
                del self._wrappers[index]
                return wrapper
        return self._new_wrapper()

    def _new_wrapper(self) -> Any:
        """Wrappers share the workspace for partial results; each has its own for its plan."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return _wrapper_class()(self._workspace, "HND", backend="fa2")


def _wrapper_class() -> Any:
    return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
