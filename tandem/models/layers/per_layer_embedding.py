"""Per-layer embeddings: computes what a layer adds to the residual stream besides its blocks' outputs, from the token's
row in a table.
"""

import torch

from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.norm import Norm
from tandem.models.layers.rounding import rounded
from tandem.models.parameters import Parameters


class PerLayerEmbedding:
    """Computes a `PerLayerEmbeddingSpec` with the tensors that it names."""

    def __init__(self, spec: PerLayerEmbeddingSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._kernels = kernels
        self._spec = spec
        self._table = parameters.tensors[spec.table.name][:, spec.start : spec.start + spec.size]
        self._table_scale = rounded(spec.table_scale, self._table.dtype)
        self._context = parameters.linear(spec.context)
        self._context_norm = Norm.take(spec.context_norm, parameters, kernels)
        self._gate = parameters.linear(spec.gate)
        self._project = parameters.linear(spec.project)
        self._after = Norm.take(spec.after, parameters, kernels)

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """The sum to add to `x` [num_tokens, hidden]. `embeddings`: the model's input embeddings, of the same shape."""
        own = self._kernels.take_rows(self._table, input_ids).mul_(self._table_scale)  # [num_tokens, size]
        given = self._context_norm(self._context(embeddings)).add_(own).mul_(self._spec.scale)
        gated = self._kernels.gated_product(self._gate(x), given, self._spec.activation)
        return self._after(self._project(gated))
