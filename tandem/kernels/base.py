"""The seam between the decoder and its compiled arithmetic: matrix products, norms, rotary embedding.

Everything here is row-wise: a token's result never depends on which other tokens share the call. The native CPU
implementation keeps that bit for bit, which is what makes batched equal alone in bfloat16 too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.feed_forward import Activation


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers of a stack have in common. `softcap` 0 = none; the rest as in the specs."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    norm_eps: float
    unit_offset: bool
    attention_scale: float
    softcap: float


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer's tensors, as the decoder names them; None is a tensor that the model does not have."""

    input_norm: torch.Tensor
    after_attention: torch.Tensor
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    q: torch.Tensor
    q_bias: torch.Tensor | None
    k: torch.Tensor
    k_bias: torch.Tensor | None
    v: torch.Tensor
    v_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    cos: torch.Tensor  # [max_positions, rotary_dim / 2] float32
    sin: torch.Tensor
    window: int | None


class PackedWeight(torch.Tensor):
    """A weight [out, in] in an order of its bytes that only the kernels that packed it know.

    It has the shape, dtype and size of what it was; whatever would read it as a matrix raises TypeError. `packed`: its
    bytes as a tensor like any other, for the kernels, to whom the guard would cost ten microseconds a call.
    """

    packed: torch.Tensor

    _ASKED = frozenset({"shape", "dtype", "device", "is_contiguous", "data_ptr", "numel", "nbytes", "element_size"})

    @classmethod
    def of(cls, packed: torch.Tensor) -> "PackedWeight":
        """What `Kernels.pack` made, wherever it is now; it begins at a cache line."""
        assert packed.data_ptr() % 64 == 0
        weight = packed.as_subclass(cls)
        weight.packed = packed
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        asked = getattr(func, "__self__", func)  # of a property, its getter's owner
        if getattr(asked, "__name__", "") not in cls._ASKED:
            raise TypeError(f"{asked} of a packed weight: only the kernels that packed it can read it")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class LayerCache(Protocol):
    """One layer's share of the arena, as `tandem.attention` has it."""

    @property
    def keys(self) -> torch.Tensor: ...  # [num_blocks, num_kv_heads, block_size, head_dim]
    @property
    def values(self) -> torch.Tensor: ...


class PagedBatch(Protocol):
    """Where one step's tokens are in a layer's cache, as `tandem.attention` has it."""

    @property
    def query_start(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...


class WantedTokens(Protocol):
    """Those whose hidden states are asked for, as `tandem.attention` has them."""

    @property
    def rows(self) -> torch.Tensor: ...
    @property
    def batches(self) -> Sequence[PagedBatch]: ...


class Stack(Protocol):
    """All layers in one call. `attention` names the attention backend whose arithmetic it has inside."""

    attention: str

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        batches: Sequence[PagedBatch],
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor:
        """Embeddings [num_tokens, hidden] to hidden states after the final norm; writes the step's K and V.

        `residual`, the embeddings, is used up. Same bits as the layers one by one. Layers of a KV group share a batch.
        `wanted`: the tokens whose hidden states are returned; None = all.
        """
        ...


class Kernels(Protocol):
    """Implemented by `tandem.kernels.native` (compiled, CPU) and `tandem.kernels.torch_kernels` (any device)."""

    def take_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows `indices` (int64 [n], each in range) of `x` [rows, size], copied: [n, size]."""
        ...

    def can_pack(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether `pack` serves a weight of that kind."""
        ...

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, in] as `PackedWeight.of` wants it: the same bits from `linear` and `gated_linear`, sooner."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x` [num_tokens, in] times `weight` [out, in] transposed, plus bias; accumulated in float32, rounded once."""
        ...

    def gated_linear(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)`: [num_tokens, in] -> [num_tokens, ffn]."""
        ...

    def gated_product(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up`, of the same shape [num_tokens, size]."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, times `weight` (`1 + weight` with `unit_offset`, as Gemma has
        it). With `residual`, first adds `x` into it in place and norms the sum.
        """
        ...

    def rope_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> None:
        """Rotate `q` [num_tokens, num_heads, head_dim] and `k` [num_tokens, num_kv_heads, head_dim] in place (after an
        optional per-head norm) and store `k` and `v` in the paged cache. `cos`, `sin`: float32 [max_positions,
        rotary_dim / 2]; half-split convention. A token of slot -1 is stored nowhere
        but perhaps in the null block, which nobody reads.
        """
        ...

    def rotate(
        self,
        q: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> None:
        """What `rope_and_write` does with `q`, for a layer without K and V of its own. `norm`: weight of its norm."""
        ...

    def stack(self, shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor) -> Stack | None:
        """The layers as one call, where there is one for such layers; None = they are to be called one by one."""
        ...
