"""Tensors as arguments of the compiled kernels: pointers, strides, and checks of memory layouts."""

import torch

from tandem.compute.native.codes import DTYPE_CODES


def has_contiguous_rows(x: torch.Tensor) -> bool:
    """Whether `x` is a matrix whose rows are contiguous; the distance between rows may be larger than a row."""
    return x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


def are_blocks(count: int, size: int) -> bool:
    """Whether `size` inputs divide into `count` equal blocks, each of an even number of inputs unless it is one."""
    return count == 1 or (count > 0 and size % (2 * count) == 0)


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides, in elements, of the outer and inner rows of a stack of matrices; of a matrix its rows' stride, and 0."""
    outer, *inner, _ = x.stride()
    return outer, inner[0] if inner else 0


def norm_weights(q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, head_dim: int) -> tuple[int, int, int]:
    """Pointers to both weights (0 = none), and the code of their dtype."""
    given = [weight for weight in (q_norm, k_norm) if weight is not None]
    assert all(w.shape == (head_dim,) and w.is_contiguous() and w.dtype == given[0].dtype for w in given)
    pointers = [0 if weight is None else weight.data_ptr() for weight in (q_norm, k_norm)]
    return pointers[0], pointers[1], DTYPE_CODES[given[0].dtype] if given else 0


def are_paged(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether K and V are alike, and pages that the kernels can read: [num_blocks, num_kv_heads, block_size, head_dim],
    each block contiguous.
    """
    return k_cache.shape == v_cache.shape and _is_paged(k_cache) and _is_paged(v_cache)


def _is_paged(cache: torch.Tensor) -> bool:
    """Whether it is [num_blocks, num_kv_heads, block_size, head_dim] with contiguous blocks, at any distance."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    _, head_stride, slot_stride, stride = cache.stride()
    return stride == 1 and slot_stride == head_dim and (num_kv_heads == 1 or head_stride == block_size * head_dim)
