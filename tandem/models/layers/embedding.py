"""Token embedding: looks up a row for each token, in a table of floats or of quantised numbers."""

from dataclasses import dataclass

import torch

from tandem.architecture.model import EMBEDDING, ModelSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.compute.ops import Kernels
from tandem.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """Embedding table of a model. `table`: [vocab, hidden]. `dtype`: dtype of the returned rows."""

    table: torch.Tensor | CodedMatrix
    dtype: torch.dtype
    kernels: Kernels

    @classmethod
    def take_optional(cls, spec: ModelSpec, parameters: Parameters, kernels: Kernels) -> "TokenEmbedding | None":
        """The embedding of the model; None = this part of the model has none."""
        if spec.embedding is None:
            return None
        table = parameters.tensors.get(EMBEDDING)
        if table is not None:
            return cls(table, table.dtype, kernels)
        coded = parameters.weights[EMBEDDING].matrix
        assert isinstance(coded, CodedMatrix), "a format with tables keeps no numbers to itself"
        return cls(coded, TORCH_DTYPES[spec.dtype], kernels)

    @property
    def device(self) -> torch.device:
        return self.table.codes.device if isinstance(self.table, CodedMatrix) else self.table.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden]."""
        if isinstance(self.table, CodedMatrix):
            return self.kernels.coded_rows(self.table, token_ids, self.dtype)
        return self.kernels.take_rows(self.table, token_ids)
