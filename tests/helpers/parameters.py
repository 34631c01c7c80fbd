"""Parameters of layers and decoders made of plain tensors, and tensors of those that were loaded."""

from collections.abc import Mapping

import torch

from tandem.architecture.model import EMBEDDING, HEAD
from tandem.compute.ops import Kernels
from tandem.compute.order import Order
from tandem.compute.weights.dense import MatrixWeight
from tandem.models.decoder import Decoder
from tandem.models.parameters import Parameters


def dense_parameters(tensors: Mapping[str, torch.Tensor], kernels: Kernels) -> Parameters:
    """Every matrix can be multiplied by; the head is the embedding where there is no other."""
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}
    if EMBEDDING in tensors:
        matrices.setdefault(HEAD, tensors[EMBEDDING])
    weights = {name: MatrixWeight(tensor, Order.ROWS, kernels) for name, tensor in matrices.items()}
    return Parameters(tensors, weights)


def tensors_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """By name, of a model whose weights are matrices; a head that is the embedding is left out."""
    tensors = dict(decoder.parameters.tensors)
    for name, weight in decoder.parameters.weights.items():
        assert weight.matrix is not None
        if name != HEAD or not decoder.spec.tie_word_embeddings:
            tensors[name] = weight.matrix.tensor
    return tensors


def packed_names(decoder: Decoder) -> set[str]:
    """Of the weights that are packed."""
    weights = decoder.parameters.weights.items()
    return {name for name, weight in weights if weight.matrix is not None and weight.matrix.order is Order.STRIPS}
