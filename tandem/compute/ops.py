"""Interface of the decoder's arithmetic, `Kernels`: matrix products, norms, rotary embedding, and calls that fuse many
of them, such as all experts or all layers.

Everything here is row-wise: a token's result does not depend on the other tokens of the call. In the native CPU
implementation not even a bit does, so results in a batch and alone are equal in bfloat16 too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.architecture.feed_forward import Activation, Clamp, RouterSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.order import Order
from tandem.compute.step import AttentionBatch, HiddenStates, WantedTokens


@dataclass(frozen=True, slots=True)
class Matrix:
    """Float weight of a linear map, [out, in]. `sum_blocks`: equal blocks of inputs that are summed separately."""

    tensor: torch.Tensor
    order: Order = Order.ROWS
    sum_blocks: int = 1


Numbers = Matrix | CodedMatrix
"""Weight of a linear map: floats, or codes with scales."""


def floats_of(parts: object, names: Iterable[str]) -> Iterator[torch.Tensor]:
    """Float tensors among the attributes `names` of `parts`: matrices that are not quantised, norms and biases."""
    for name in names:
        part = getattr(parts, name)
        if isinstance(part, Matrix):
            yield part.tensor
        elif isinstance(part, torch.Tensor):
            yield part


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of one expert, a gated block. A bias None = it has none."""

    gate: Numbers  # [ffn, hidden]
    up: Numbers
    down: Numbers  # [hidden, ffn]
    gate_bias: torch.Tensor | None  # [ffn]
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None  # [hidden]


class Experts(Protocol):
    """The routed experts of a layer as one call, which reads only the experts that some token has chosen."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Weighted sum of each token's experts, [num_tokens, hidden], added in float32 in the order of expert indices.

        `x` [num_tokens, hidden]; `weights` float32 and `chosen` int64, both [num_tokens, top_k]: the factors of a
        token's experts, and their indices, all different. `out_dtype`: float32 or the dtype of `x`, rounded once.
        """
        ...


class ExpertChoice(Protocol):
    """Chooses the experts of each token from a router's logits. Row-wise."""

    def __call__(self, logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits` [num_tokens, num_experts] -> weights, float32, and experts, int64, both [num_tokens, top_k].

        `dtype`: the model's dtype, to which weights are rounded if the spec says so.
        """
        ...


@dataclass(frozen=True, slots=True)
class StackShape:
    """Options that all layers of a stack share. `softcap` 0 = none; the rest as in the specs.

    `num_experts` 0 = the layers have gated blocks; else mixtures of experts, whose inner size is `intermediate_size`.
    """

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
    num_experts: int = 0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class StackMixture:
    """A layer's router and experts, as `Kernels.expert_choice` and `Kernels.experts` return them."""

    router: Numbers  # [num_experts, hidden]
    router_bias: torch.Tensor | None
    choice: ExpertChoice
    experts: Experts


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Weights of one layer, by the decoder's names. None = the model has no such tensor."""

    input_norm: torch.Tensor
    after_attention: torch.Tensor
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    q: Numbers
    q_bias: torch.Tensor | None
    k: Numbers
    k_bias: torch.Tensor | None
    v: Numbers
    v_bias: torch.Tensor | None
    o: Numbers
    o_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    gate: Numbers | None
    up: Numbers | None
    down: Numbers | None
    cos: torch.Tensor  # [max_positions, rotary_dim / 2] float32
    sin: torch.Tensor
    window: int | None
    mixture: StackMixture | None = None  # in place of gate, up and down


class Stack(Protocol):
    """All layers of a model as one call. `attention`: name of the attention backend that computes the same bits."""

    attention: str

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[Any],
        batches: Sequence[AttentionBatch],
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Computes embeddings [num_tokens, hidden] to hidden states after the final norm; writes the step's K and V.

        `residual`, the embeddings, is overwritten. `caches`: a `LayerKV` for each layer. The bits are the same as with
        separate calls. Layers of a KV group share a batch. `wanted`: the tokens whose hidden states are returned; None
        = all. `states`: is filled in, except for the output of the final norm.
        """
        ...


class Kernels(Protocol):
    """Arithmetic of the decoder on one device. Implemented by `native` (compiled, for CPUs), `torch.kernels` (any
    device) and `cuda.kernels` (NVIDIA GPUs).
    """

    def take_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows `indices` (int64 [n], each in range) of `x` [rows, size], copied: [n, size]."""
        ...

    def can_pack(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether `pack` supports a weight of this shape and dtype."""
        ...

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, in] in `Order.STRIPS`, for memory that begins at a cache line: products have the same bits and
        are faster.
        """
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        order: Order = Order.ROWS,
        sum_blocks: int = 1,
    ) -> torch.Tensor:
        """`x` [num_tokens, in] times `weight` [out, in] transposed, plus bias [out]; accumulated in float32, rounded
        once to `out_dtype`; None = the dtype of `x`. `order`: of `weight`.

        `sum_blocks`: number of equal blocks of inputs, each of an even number, that are summed from zero and then added
        in a binary tree (`LinearSpec.sum_blocks`). Kernels that do not promise bits may add in another order.
        """
        ...

    def can_pack_coded(self, matrix: CodedMatrix) -> bool:
        """Whether `pack_coded` supports a matrix of this kind, shape and group size."""
        ...

    def pack_coded(self, matrix: CodedMatrix) -> CodedMatrix:
        """The matrix in `Order.STRIPS`, for codes whose memory begins at a cache line: products have the same bits and
        are faster. For a matrix on the meta device only the shapes are computed.
        """
        ...

    def coded_rows(self, matrix: CodedMatrix, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `indices` (int64 [n], each in range) of a quantised matrix, decoded to `dtype`: [n, in]."""
        ...

    def coded_linear(
        self,
        x: torch.Tensor,
        matrix: CodedMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`linear` with a quantised matrix: sums over a group in float32, times its scale, plus its offset times the
        sum of its inputs. With `matrix.rounds_rows` the rows are rounded to 8 bits first; a group's sum is then exact.
        """
        ...

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor, *, order: Order = Order.ROWS) -> torch.Tensor:
        """`x` [num_tokens, heads, in], each head times its own matrix of `weight` [heads, out, in], transposed:
        [num_tokens, heads, out], accumulated in float32, rounded once. `order`: of each matrix.
        """
        ...

    def gated_linear(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        *,
        order: Order = Order.ROWS,
    ) -> torch.Tensor:
        """`activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)`: [num_tokens, in] -> [num_tokens, ffn]."""
        ...

    def coded_gated_linear(
        self,
        x: torch.Tensor,
        gate: CodedMatrix,
        up: CodedMatrix,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """`gated_linear` with quantised matrices; None = these two must be multiplied separately."""
        ...

    def gated_product(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up`, of the same shape [num_tokens, size]."""
        ...

    def sinkhorn(self, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        """Sinkhorn normalisation: float32 matrices made from `logits` [num_tokens, n, n], of that shape, whose rows and
        columns sum to nearly 1. Hyper-connections mix residual streams by them.

        The softmax of each row, plus `eps`; then columns, and `iterations - 1` times rows and columns, are divided by
        their sums plus `eps`.
        """
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
        """Rotates `q` [num_tokens, num_heads, head_dim] and `k` [num_tokens, num_kv_heads, head_dim] in place (after an
        optional per-head norm) and stores `k` and `v` in the paged cache. `cos`, `sin`: float32 [max_positions,
        rotary_dim / 2]; half-split convention. A token with slot -1 is not stored, except perhaps in the null block,
        which is never read.

        Args:
            v: [num_tokens, num_kv_heads, head_dim].
            positions, slot_mapping: int64 [num_tokens]; a slot is block number * block size + offset in the block.
            k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
            q_norm, k_norm: weights of root-mean-square norms, [head_dim]; None = no norm.
            norm_eps, unit_offset: of both norms, as in `rms_norm`.
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
        """Norms and rotates `q` in place, as `rope_and_write`, for layers without their own K and V. `norm`: weight of
        the norm, [head_dim]; None = no norm.
        """
        ...

    def stack(self, shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor) -> Stack | None:
        """The layers as one call; None = these kernels have no such call, and layers are called separately."""
        ...

    def experts(self, activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]) -> Experts | None:
        """A layer's experts as one call; None = these kernels have no such call, and experts are called separately."""
        ...

    def expert_choice(
        self, spec: RouterSpec, correction: torch.Tensor | None, expert_scales: torch.Tensor | None
    ) -> ExpertChoice | None:
        """The routing rule of `spec` as one call; None = these kernels have no such call for it.

        `correction`, `expert_scales`: the tensors that the spec names, [num_experts] float32. The spec's norm is not
        part of the rule.
        """
        ...
