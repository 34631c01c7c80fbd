"""Output head: computes logits of residual streams with the final norm and the head of a model, without its layers."""

from dataclasses import replace

import torch

from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.compute.ops import Kernels
from tandem.compute.order import Order
from tandem.compute.weights.dense import MatrixWeight
from tandem.models.decoder import Decoder
from tandem.models.layers.norm import Norm
from tandem.models.parameters import Parameters


class OutputHead:
    """Final norm and head of a model; calling it turns hidden states [rows, hidden] into logits [rows, vocab], float32.

    Args:
        norm: weight of the final norm, float32; None = it has none.
        rows: weight of the head, [vocab, hidden] of any dtype.
    """

    def __init__(self, spec: ModelSpec, norm: torch.Tensor | None, rows: torch.Tensor, kernels: Kernels) -> None:
        rows = rows.float()
        tensors = {EMBEDDING: rows}
        if norm is not None:
            assert spec.final_norm.tensor_name is not None
            tensors[spec.final_norm.tensor_name] = norm
        parameters = Parameters(tensors, {HEAD: MatrixWeight(rows, Order.ROWS, kernels)})
        self._norm = Norm.take(spec.final_norm, parameters, kernels)
        self._decoder = Decoder(replace(spec, layers=()), parameters, kernels)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], float32."""
        return self._decoder.logits(self._norm(hidden))
