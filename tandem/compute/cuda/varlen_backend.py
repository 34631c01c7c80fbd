"""Attention backend on NVIDIA GPUs with PyTorch's variable-length FlashAttention over paged KV.

PyTorch supports a block table only with a FlashAttention of another package: FA3 on Hopper, FA4 on Blackwell. The
needed one is activated for the whole process, unless another already is. Both take pages by strides, so head-major
pages are passed as a transposed view. They cannot soft-cap. Not yet exercised on a GPU.

NOTE: a tile that straddles a window's start also loads the null or freed block before it and masks its scores. That is
exact while the KV cache holds finite numbers, which it does from its allocation on.
"""

import inspect
from collections.abc import Collection
from importlib import import_module

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch

NEEDED_ARGUMENTS = frozenset({"window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})
IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}  # by major compute capability
MAX_HEAD_DIM = {"FA3": 256, "FA4": 128}
# What the packages raise: when they are missing, broken, or made for another PyTorch.
ACTIVATION_ERRORS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)


class VarlenBackend:
    """Implements `AttentionBackend` with `torch.nn.attention.varlen.varlen_attn`, with split KV off, so that splits
    never depend on the batch.

    Args:
        device: device of the KV cache.
    """

    name = "varlen"
    graph_safe = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why FlashAttention cannot serve such a layer, with a remedy if there is one; None = it can. Activates
        the needed FlashAttention.
        """
        if sinks:
            return "it has no attention sinks"
        if self._device.type != "cuda":
            return f"device {self._device} is not CUDA"
        if softcap:
            return f"softcap={softcap}: PyTorch's FlashAttention cannot soft-cap"
        if spec.dtype not in ("bfloat16", "float16"):
            return f"dtype {spec.dtype} is neither bfloat16 nor float16"
        return missing_arguments() or self._refuses_kernel(spec)

    def _refuses_kernel(self, spec: KVSpec) -> str | None:
        major, _ = torch.cuda.get_device_capability(self._device)
        needed = IMPLEMENTATIONS.get(major)
        if needed is None:
            return f"no FlashAttention of PyTorch's reads paged KV on compute capability {major}.x"
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM[needed]:
            return f"head_dim={spec.head_dim}: {needed} serves multiples of 8 up to {MAX_HEAD_DIM[needed]}"
        return _activate(needed)

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype."""
        out: torch.Tensor = import_module("torch.nn.attention.varlen").varlen_attn(
            queries,
            kv.keys.transpose(1, 2),  # [num_blocks, block_size, num_kv_heads, head_dim]
            kv.values.transpose(1, 2),
            batch.query_start,
            None,
            batch.max_query_len,
            batch.max_seq_len,
            scale=params.scale,
            window_size=(-1 if params.window is None else params.window - 1, 0),
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.block_tables,
            num_splits=1,
        )
        return out


def missing_arguments() -> str | None:
    """Arguments that this PyTorch's `varlen_attn` lacks; None = it has all. The list grew from release to release."""
    try:
        varlen = import_module("torch.nn.attention.varlen")
    except ImportError:
        return f"torch {torch.__version__} has no variable-length attention"
    missing = NEEDED_ARGUMENTS - inspect.signature(varlen.varlen_attn).parameters.keys()
    return f"varlen_attn of torch {torch.__version__} lacks {sorted(missing)}" if missing else None


def _activate(needed: str) -> str | None:
    """Activates the implementation `needed`. Returns the reason if that is impossible; None = it is active."""
    attention = import_module("torch.nn.attention")
    try:
        if attention.current_flash_attention_impl() is None:
            attention.activate_flash_attention_impl(needed)
        active = attention.current_flash_attention_impl()
    except ACTIVATION_ERRORS as error:
        return f"{needed} cannot be activated: {error}; install a {needed} that PyTorch {torch.__version__} can use"
    if active != needed:
        return f"{needed} is not active (active: {active}); activate no other FlashAttention in this process"
    return None
