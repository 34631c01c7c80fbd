"""Plan of loading a model: its tensors, and the format in which each weight of a linear map is stored."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.compute.weights.base import WeightFormat
from tandem.compute.weights.formats import choose_format


@dataclass(frozen=True, slots=True)
class LoadingPlan:
    """Tensors and weights to load. `tensors`: all that are not weights of linear maps. `weights`: these, each with its
    format, and also a quantised embedding. A head tied to a quantised embedding is left out, since they are one weight.
    """

    tensors: tuple[TensorSpec, ...]
    weights: tuple[tuple[TensorSpec, WeightFormat], ...]

    @classmethod
    def of(cls, spec: ModelSpec, formats: Sequence[WeightFormat]) -> "LoadingPlan":
        """Plan for a model. Each weight gets the first of `formats` that accepts it.

        Raises:
            UnsupportedCheckpointError: all formats refuse a weight.
        """
        tensors = [tensor for tensor in spec.tensors() if not tensor.is_weight]
        weights = [(weight, choose_format(weight, formats)) for weight in spec.weights()]
        embedding = spec.embedding
        table = None if embedding is None else next((each for each in formats if each.has_table(embedding)), None)
        if embedding is not None and table is not None:
            tensors.remove(embedding)
            if spec.tie_word_embeddings and spec.head_tokens is None:
                weights = [entry for entry in weights if entry != (spec.head, table)]
            weights.append((embedding, table))
        return cls(tuple(tensors), tuple(weights))

    @classmethod
    def of_tensors(cls, tensors: Iterable[TensorSpec], formats: Sequence[WeightFormat]) -> "LoadingPlan":
        """Plan for a draft head, whose embedding and output head are treated like other weights.

        Raises:
            UnsupportedCheckpointError: all formats refuse a weight.
        """
        found = tuple(tensors)
        weights = ((tensor, choose_format(tensor, formats)) for tensor in found if tensor.is_weight)
        return cls(tuple(tensor for tensor in found if not tensor.is_weight), tuple(weights))

    def stored(self) -> Iterator[TensorSpec]:
        """All tensors that the checkpoint must have. A tied head and the embedding have the same source."""
        yield from self.tensors
        for weight, weight_format in self.weights:
            yield from weight_format.checkpoint_tensors(weight)

    def num_bytes(self, dtype: str) -> int:
        """Bytes in memory, for a model of that dtype."""
        kept = [*self.tensors]
        for weight, weight_format in self.weights:
            kept += weight_format.memory_tensors(weight)
        sizes = {tensor.source or Source(tensor.name): num_bytes_of(tensor, dtype) for tensor in kept}
        return sum(sizes.values())


def dtype_of(tensor: TensorSpec, model_dtype: str) -> torch.dtype:
    """The dtype that the tensor has in a model of `model_dtype`."""
    if tensor.code_dtype is not None:
        found: torch.dtype = getattr(torch, tensor.code_dtype)
        return found
    return torch.float32 if tensor.is_float32 else TORCH_DTYPES[model_dtype]


def num_bytes_of(tensor: TensorSpec, model_dtype: str) -> int:
    """Bytes of the tensor in a model of `model_dtype`."""
    return tensor.size * dtype_of(tensor, model_dtype).itemsize
