"""Per-layer embeddings: a layer's own addition for each token."""

from collections.abc import Mapping

import torch

from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.linear import Linear, Norm
from tandem.models.layers.rounding import rounded


class PerLayerEmbedding:
    """Computes a `PerLayerEmbeddingSpec` with the tensors that it names."""

    def __init__(self, spec: PerLayerEmbeddingSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._spec = spec
        self._table = weights[spec.table.name][:, spec.start : spec.start + spec.size]
        self._table_scale = rounded(spec.table_scale, self._table.dtype)
        self._context = Linear.take(spec.context, weights, kernels)
        self._context_norm = Norm.take(spec.context_norm, weights, kernels)
        self._gate = Linear.take(spec.gate, weights, kernels)
        self._project = Linear.take(spec.project, weights, kernels)
        self._after = Norm.take(spec.after, weights, kernels)

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """What is to be added to `x` [num_tokens, hidden]. `embeddings`, alike: what the model begins with."""
        own = self._kernels.take_rows(self._table, input_ids).mul_(self._table_scale)  # [num_tokens, size]
        given = self._context_norm(self._context(embeddings)).add_(own).mul_(self._spec.scale)
        gated = self._kernels.gated_product(self._gate(x), given, self._spec.activation)
        return self._after(self._project(gated))
