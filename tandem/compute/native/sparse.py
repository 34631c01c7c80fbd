"""Compiled choice of tokens and attention to them on the CPU.

What a query chooses, and its result, are the same however its prompt is cut and whatever shares its step.
"""

import torch

from tandem.architecture.state import IndexedLatentSpec
from tandem.compute.arena import LayerIndexedLatents
from tandem.compute.native.arguments import bind
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.build import load_library
from tandem.compute.native.codes import DTYPE_CODES
from tandem.compute.sparse import ChosenRowsAsKV, IndexQueries, QueryBatch
from tandem.core.errors import ConfigurationError

CHOOSE_TOKENS_FIELDS = "15qdq"
_MULTIPLE, _MAX_DIM = 8, 1024


class NativeIndexedBackend(ChosenRowsAsKV):
    """Implements `IndexedLatentBackend` on the CPU for rows and index keys of a multiple of 8 numbers, up to 576 and
    1,024, where the kernels can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(NativeBackend(device))
        if device.type == "cpu":
            try:
                self._choose = bind(load_library(), "tandem_choose_tokens", CHOOSE_TOKENS_FIELDS)
            except ConfigurationError:
                return  # NOTE: attention refuses for the same reason

    def refuses(self, spec: IndexedLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        if spec.index_dim % _MULTIPLE or spec.index_dim > _MAX_DIM:
            return f"index_dim={spec.index_dim} is not a multiple of {_MULTIPLE} up to {_MAX_DIM}"
        return ChosenRowsAsKV.refuses(self, spec, block_size, softcap, sinks=sinks)

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """See `IndexedLatentBackend.choose`."""
        keys, queries, weights = latents.index_keys, index.queries.contiguous(), index.weights.contiguous()
        assert keys is not None
        _, block_size, dim = keys.shape
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
        chosen = torch.empty(num_tokens, min(top_k, batch.max_seq_len), dtype=torch.int32)
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
            chosen.shape[1],
            index.scale,
            torch.get_num_threads(),
        )
        return chosen
