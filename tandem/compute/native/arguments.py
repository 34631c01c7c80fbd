"""Arguments of the compiled kernels in place of tensors: pointers and strides, and tensor layouts."""

import torch

from tandem.compute.native.codes import DTYPE_CODES


def has_contiguous_rows(x: torch.Tensor) -> bool:
    """A matrix whose rows are contiguous; the rows themselves may be strided."""
    return x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


def are_blocks(count: int, size: int) -> bool:
    """Whether `size` inputs are so many equal blocks of an even number of them; one block is of any number."""
    return count == 1 or (count > 0 and size % (2 * count) == 0)


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides of the outer and inner rows of a matrix or of a stack of them."""
    outer, *inner, _ = x.stride()
    return outer, inner[0] if inner else 0


def norm_weights(q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, head_dim: int) -> tuple[int, int, int]:
    """Pointers to both weights (0 = none), and their dtype's code."""
    given = [weight for weight in (q_norm, k_norm) if weight is not None]
    assert all(w.shape == (head_dim,) and w.is_contiguous() and w.dtype == given[0].dtype for w in given)
    pointers = [0 if weight is None else weight.data_ptr() for weight in (q_norm, k_norm)]
    return pointers[0], pointers[1], DTYPE_CODES[given[0].dtype] if given else 0


def are_paged(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether they are alike and the kernels read both."""
    return k_cache.shape == v_cache.shape and _is_paged(k_cache) and _is_paged(v_cache)


def _is_paged(cache: torch.Tensor) -> bool:
    """[num_blocks, num_kv_heads, block_size, head_dim], each block contiguous; the blocks themselves may be strided."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    _, head_stride, slot_stride, stride = cache.stride()
    return stride == 1 and slot_stride == head_dim and (num_kv_heads == 1 or head_stride == block_size * head_dim)
