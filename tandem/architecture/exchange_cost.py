"""Bytes that the ranks of a tensor-parallel worker exchange in one step, counted from one rank's part of the model."""

from collections.abc import Iterator

from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec

_SUM_BYTES, _ROW_BYTES = 4.0, 2.0  # partial sums are float32, rows of activations have 16 bits


def exchange_bytes(shard: ModelSpec, num_ranks: int) -> list[float]:
    """Bytes that a rank sends per token in each exchange of a step, if every token needs logits. Exchanges of expert
    outputs count the mean over the ranks. Quantised weights are counted as if they were not quantised.
    """
    if num_ranks == 1:
        return []
    assert shard.head_tokens is not None, "it is a part of a model"
    first, end = shard.head_tokens
    return [
        *(_SUM_BYTES * tensor.shape[0] for tensor in shard.weights() if tensor.is_partial),
        *_norms(shard),
        *_experts(shard, num_ranks),
        _SUM_BYTES * (end - first),
    ]


def _norms(shard: ModelSpec) -> Iterator[float]:
    """Exchanges for norms over all heads of attention."""
    for mixer in shard.mixers:
        norms = (mixer.q_norm, mixer.k_norm) if isinstance(mixer, AttentionSpec) else ()
        for norm in norms:
            if norm is not None and norm.within is not None:
                yield _ROW_BYTES * (norm.within[1] - norm.within[0])


def _experts(shard: ModelSpec, num_ranks: int) -> Iterator[float]:
    for layer in shard.layers:
        if layer.routed is not None:
            yield _SUM_BYTES * layer.routed.top_k * shard.hidden_size / num_ranks
