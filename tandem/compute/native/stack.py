"""All layers of a decoder as one compiled call, over tables of pointers.

It computes the same calls as the decoder, in the same order, so the bits are the same. It keeps alive all tensors that
it has pointers to. Indices (positions, slots, block tables) are not checked. Only one step at a time: steps share
scratch memory.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from tandem.compute.codes import CodedMatrix
from tandem.compute.huge_pages import LEAST_BYTES, advise_huge_pages
from tandem.compute.layer_states import LayerKV
from tandem.compute.native.calls import struct_of
from tandem.compute.native.coded_matrix import are_alike, reference_to
from tandem.compute.native.coded_matrix import serves as serves_codes
from tandem.compute.native.codes import ACTIVATION_CODES, DTYPE_CODES
from tandem.compute.native.expert_choice import CHOICE_FIELDS, NativeExpertChoice
from tandem.compute.native.experts import EXPERTS_FIELDS, NativeExperts
from tandem.compute.ops import Matrix, Numbers, StackLayer, StackMixture, StackShape, floats_of
from tandem.compute.order import Order
from tandem.compute.step import AttentionBatch, HiddenStates, WantedTokens

STACK_FIELDS = """
    dtype activation unit_offset hidden ffn num_heads num_kv_heads head_dim block_size num_experts top_k eps:d
    scale:d softcap:d num_layers layers final_norm caches residual scratch out positions query_start seq_lens
    num_tokens num_requests is_packed threads wanted.rows wanted.num_rows wanted.query_start wanted.seq_lens
    wanted.block_tables wanted.table_stride wanted.num_requests states.rows states.stride
"""
MAX_HEAD_DIM = 256
_WEIGHT_BYTES, _NUMBER_BYTES = 4, 8  # of a chosen expert

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_TABLES = ("cos", "sin")
_WEIGHTS = tuple(field.name for field in fields(StackLayer) if field.name not in (*_TABLES, "window", "mixture"))
LAYER_FIELDS = (  # of the C++ struct, in order; tests compare them
    *(
        field
        for name in _WEIGHTS
        for field in ((f"{name}.floats", f"{name}.codes", f"{name}.sum_blocks") if name in _MATRICES else (name,))
    ),
    *(*_TABLES, "half", "window", "mixture"),
)
_pack_mixture = struct_of(f"router router_bias {CHOICE_FIELDS} {EXPERTS_FIELDS}").pack


def serves(shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor) -> bool:
    """Whether the compiled stack supports such layers: on the CPU, of one dtype, with supported heads."""
    weights = [final_norm, *(tensor for layer in layers for tensor in floats_of(layer, _WEIGHTS))]
    matrices: list[Numbers | None] = [getattr(layer, name) for layer in layers for name in _MATRICES]
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    weights += [mixture.router.tensor for mixture in mixtures if isinstance(mixture.router, Matrix)]
    return (
        len(layers) > 0
        and len({matrix.order for matrix in matrices if isinstance(matrix, Matrix)}) <= 1
        and all(serves_codes(matrix) for matrix in matrices if isinstance(matrix, CodedMatrix))
        and all(_are_gated_at_once(layer) for layer in layers)
        and all(_is_native(mixture, final_norm.dtype) for mixture in mixtures)
        and shape.head_dim % 8 == 0
        and shape.head_dim <= MAX_HEAD_DIM
        and final_norm.dtype in DTYPE_CODES
        and all(x.device.type == "cpu" and x.dtype == final_norm.dtype and x.is_contiguous() for x in weights)
    )


def _are_gated_at_once(layer: StackLayer) -> bool:
    gate, up = layer.gate, layer.up
    if isinstance(gate, CodedMatrix) and isinstance(up, CodedMatrix):
        return are_alike(gate, up)
    return not (isinstance(gate, CodedMatrix) or isinstance(up, CodedMatrix))


class NativeStack:
    """Implements `Stack` with the compiled function.

    Args:
        call: the compiled function.
        shape, layers, final_norm: arguments for which `serves` is true.
    """

    attention = "native"

    def __init__(
        self, call: Callable[..., None], shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor
    ) -> None:
        self._call = call
        self._shape = shape
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._mixtures = [_mixture(layer.mixture, final_norm.dtype) for layer in layers]
        self._references: list[ctypes.Array[ctypes.c_char]] = []
        rows = [self._constants(*pair) for pair in zip(layers, self._mixtures, strict=True)]
        self._table = torch.tensor(rows, dtype=torch.int64)  # [num_layers, 36]
        self._order = _order_of(layers)
        self._scratch = final_norm.new_empty(0)
        self._caches: Sequence[LayerKV] = ()
        self._cache_pointers: list[tuple[int, int, int, int]] = []

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerKV],
        batches: Sequence[AttentionBatch],
        wanted: WantedTokens | None = None,
        states: HiddenStates | None = None,
    ) -> torch.Tensor:
        """See `tandem.compute.ops.Stack`."""
        shape, first = self._shape, batches[0]
        num_tokens = residual.shape[0]
        assert residual.shape == (num_tokens, shape.hidden_size)
        assert residual.is_contiguous()
        assert residual.dtype == self._final_norm.dtype
        assert positions.shape == (num_tokens,)
        assert positions.dtype == torch.int64
        assert first.query_start.dtype == first.seq_lens.dtype == torch.int32
        where = torch.tensor(self._where(caches, batches, num_tokens), dtype=torch.int64)  # [num_layers * 7]
        scratch = self._scratch_for(num_tokens)
        read = None if states is None else _state_pointers(states, len(self._layers))
        out = torch.empty_like(residual) if wanted is None else residual.new_empty(len(wanted.rows), shape.hidden_size)
        self._call(
            DTYPE_CODES[residual.dtype],
            ACTIVATION_CODES[shape.activation],
            shape.unit_offset,
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            caches[0].keys.shape[2],
            shape.num_experts,
            shape.top_k,
            shape.norm_eps,
            shape.attention_scale,
            shape.softcap,
            len(self._layers),
            self._table.data_ptr(),
            self._final_norm.data_ptr(),
            where.data_ptr(),
            residual.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            first.query_start.data_ptr(),
            first.seq_lens.data_ptr(),
            num_tokens,
            first.seq_lens.shape[0],
            self._order,
            torch.get_num_threads(),
            *_wanted_fields(wanted, len(self._layers) - 1),
            *((0, 0) if states is None or read is None else (read.data_ptr(), states.tensor.stride(0))),
        )
        return out

    def _constants(self, layer: StackLayer, mixture: torch.Tensor | None) -> list[int]:
        """Constant fields of a layer, in the order of the C++ struct."""
        assert layer.cos.shape == layer.sin.shape
        assert layer.cos.dtype == layer.sin.dtype == torch.float32
        assert layer.cos.is_contiguous()
        assert layer.sin.is_contiguous()
        numbers: list[int] = []
        for name in _WEIGHTS:
            part = getattr(layer, name)
            numbers += self._pointers(part) if name in _MATRICES else [0 if part is None else part.data_ptr()]
        where = 0 if mixture is None else mixture.data_ptr()
        return [*numbers, layer.cos.data_ptr(), layer.sin.data_ptr(), layer.cos.shape[1], layer.window or 0, where]

    def _pointers(self, matrix: Numbers | None) -> tuple[int, int, int]:
        """Pointers to floats and to codes, of which one is 0, and the number of blocks in which floats are summed."""
        if matrix is None:
            return 0, 0, 1
        if not isinstance(matrix, CodedMatrix):
            return matrix.tensor.data_ptr(), 0, matrix.sum_blocks
        self._references.append(reference_to(matrix))
        return 0, ctypes.addressof(self._references[-1]), 1

    def _scratch_for(self, num_tokens: int) -> torch.Tensor:
        """Scratch memory, kept between steps, in huge pages if possible: fresh small pages cost a prefill 10 %."""
        size = num_tokens * _scratch_width(self._shape, self._final_norm.itemsize)
        if self._scratch.numel() < size:
            self._scratch = self._final_norm.new_empty(max(size, LEAST_BYTES // self._final_norm.itemsize))
            advise_huge_pages(self._scratch)
        return self._scratch

    def _where(self, caches: Sequence[LayerKV], batches: Sequence[AttentionBatch], num_tokens: int) -> list[int]:
        """For each layer: its caches and their strides, its block tables and their stride, its slots."""
        if caches is not self._caches:
            self._caches, self._cache_pointers = caches, [_cache_pointers(cache, self._shape) for cache in caches]
        steps = {id(batch): batch for batch in batches}
        pointers = {key: _step_pointers(batch, num_tokens) for key, batch in steps.items()}
        pairs = zip(self._cache_pointers, batches, strict=True)
        return [number for cache, batch in pairs for number in (*cache, *pointers[id(batch)])]


def _order_of(layers: Sequence[StackLayer]) -> Order:
    """Storage order of the float matrices."""
    matrices = (getattr(layer, name) for layer in layers for name in _MATRICES)
    return next((matrix.order for matrix in matrices if isinstance(matrix, Matrix)), Order.ROWS)


def _is_native(mixture: StackMixture, dtype: torch.dtype) -> bool:
    """Whether the compiled stack supports router, rule and experts, all of one dtype."""
    router, experts = mixture.router, mixture.experts
    return (
        isinstance(mixture.choice, NativeExpertChoice)
        and isinstance(experts, NativeExperts)
        and experts.dtype in (None, dtype)
        and isinstance(router, Matrix)
        and router.order is Order.ROWS
        and (mixture.router_bias is None or mixture.router_bias.dtype == dtype)
    )


def _mixture(mixture: StackMixture | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The C++ struct of a mixture of experts; None = the layer has none."""
    if mixture is None:
        return None
    assert isinstance(mixture.choice, NativeExpertChoice)
    assert isinstance(mixture.experts, NativeExperts)
    assert isinstance(mixture.router, Matrix)
    bias = 0 if mixture.router_bias is None else mixture.router_bias.data_ptr()
    router = mixture.router.tensor.data_ptr()
    packed = _pack_mixture(router, bias, *mixture.choice.fields(dtype), *mixture.experts.fields())
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)


def _cache_pointers(cache: LayerKV, shape: StackShape) -> tuple[int, int, int, int]:
    for x in (cache.keys, cache.values):
        _, num_kv_heads, block_size, head_dim = x.shape
        assert (num_kv_heads, head_dim) == (shape.num_kv_heads, shape.head_dim)
        assert x.stride()[1:] == (block_size * head_dim, head_dim, 1)
    return cache.keys.data_ptr(), cache.keys.stride(0), cache.values.data_ptr(), cache.values.stride(0)


def _step_pointers(batch: AttentionBatch, num_tokens: int) -> tuple[int, int, int]:
    assert batch.block_tables.dtype == torch.int32
    assert batch.block_tables.stride(1) == 1
    assert batch.slot_mapping.shape == (num_tokens,)
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.slot_mapping.is_contiguous()
    return batch.block_tables.data_ptr(), batch.block_tables.stride(0), batch.slot_mapping.data_ptr()


def _wanted_fields(wanted: WantedTokens | None, last_layer: int) -> tuple[int, ...]:
    """Fields of the C++ struct for `wanted`, in order. Only the last layer skips tokens."""
    if wanted is None:
        return (0,) * 7
    rows, batch = wanted.rows, wanted.batches[last_layer]
    assert rows.dtype == torch.int64
    assert rows.is_contiguous()
    assert batch.query_start.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32
    assert batch.block_tables.stride(1) == 1 or not len(rows)
    return (
        rows.data_ptr() or 1,  # NOTE: none is another answer than all, and an empty tensor has no address
        len(rows),
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.seq_lens.shape[0],
    )


def _state_pointers(states: HiddenStates, num_layers: int) -> torch.Tensor:
    """[num_layers] int64: where each layer's input is to be written; 0 = nowhere."""
    pointers, width = [0] * num_layers, states.tensor.shape[1] // len(states.layers) * states.tensor.itemsize
    for place, layer in enumerate(states.layers):
        if layer < num_layers:
            pointers[layer] = states.tensor.data_ptr() + place * width
    return torch.tensor(pointers, dtype=torch.int64)


def _scratch_width(shape: StackShape, itemsize: int) -> int:
    """Scratch elements per token: normed, delta; q, k, v; attended; gated; a router's logits, weights and choice."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    choice = shape.num_experts + shape.top_k * (_WEIGHT_BYTES + _NUMBER_BYTES) // itemsize
    return 2 * shape.hidden_size + heads * shape.head_dim + shape.intermediate_size + choice
