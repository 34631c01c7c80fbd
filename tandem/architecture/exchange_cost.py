"""Exchanges of one step among the ranks of a worker, counted from a rank's part of the model. Plain arithmetic."""

from collections.abc import Iterator

from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec

_SUM_BYTES, _ROW_BYTES = 4.0, 2.0  # partial sums are float32, rows of activations have 16 bits


def exchange_bytes(shard: ModelSpec, num_ranks: int) -> list[float]:
    """Bytes that a rank sends for each token in each exchange of a step whose tokens all have logits. Outputs of
    experts: the mean of a rank. Weights as codes are counted as if they were none.
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
    """Those over all heads of attention."""
    for mixer in shard.mixers:
        norms = (mixer.q_norm, mixer.k_norm) if isinstance(mixer, AttentionSpec) else ()
        for norm in norms:
            if norm is not None and norm.within is not None:
                yield _ROW_BYTES * (norm.within[1] - norm.within[0])


def _experts(shard: ModelSpec, num_ranks: int) -> Iterator[float]:
    for layer in shard.layers:
        if layer.routed is not None:
            yield _SUM_BYTES * layer.routed.top_k * shard.hidden_size / num_ranks
