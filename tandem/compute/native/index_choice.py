"""Compiled choice in sparse attention: for each query the `top_k` tokens, or entries, with the best index keys.

`IndexQueries` says how a key is scored. An entry is a row that stands for a span of several tokens (DeepSeek-V4).
"""

import torch

from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.compute.native.codes import DTYPE_CODES
from tandem.compute.sparse import IndexQueries, QueryBatch

CHOOSE_BY_INDEX_FIELDS = """
    dtype q weights keys key_block_stride block_tables table_stride query_start seq_lens chosen num_requests
    num_heads dim block_size span most scale:d threads
"""
MULTIPLE, MAX_DIM = 8, 1024  # numbers of an index key


class IndexChoice:
    """Function that chooses by index keys on the CPU; a key has a multiple of 8 numbers, up to 1,024.

    Raises:
        ConfigurationError: the kernels cannot be compiled or loaded on this machine.
    """

    def __init__(self) -> None:
        self._choose = bind(load_library(), "tandem_choose_by_index", CHOOSE_BY_INDEX_FIELDS)

    def __call__(
        self,
        index: IndexQueries,
        keys: torch.Tensor,
        batch: QueryBatch,
        top_k: int,
        *,
        block_size: int,
        span: int = 1,
    ) -> torch.Tensor:
        """See `IndexedLatentBackend.choose` and `EntriesBackend.choose`. `keys` [num_blocks, keys of a block, dim]: one
        key for each `span` tokens, in the block of the last of them.
        """
        queries, weights = index.queries.contiguous(), index.weights.contiguous()
        _, _, dim = keys.shape
        num_tokens, num_heads, _ = queries.shape
        assert queries.shape == (num_tokens, num_heads, dim)
        assert queries.dtype == keys.dtype
        assert weights.shape == (num_tokens, num_heads)
        assert weights.dtype == torch.float32
        assert keys.stride()[1:] == (dim, 1)
        assert len(batch.requests) == num_tokens
        assert batch.query_start.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32
        assert batch.block_tables.stride(1) == 1
        assert all(x.is_contiguous() for x in (batch.query_start, batch.seq_lens))
        chosen = torch.empty(num_tokens, min(top_k, batch.max_seq_len // span), dtype=torch.int32)
        self._choose(
            DTYPE_CODES[keys.dtype],
            queries.data_ptr(),
            weights.data_ptr(),
            keys.data_ptr(),
            keys.stride(0),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            chosen.data_ptr(),
            batch.num_requests,
            num_heads,
            dim,
            block_size,
            span,
            chosen.shape[1],
            index.scale,
            torch.get_num_threads(),
        )
        return chosen
