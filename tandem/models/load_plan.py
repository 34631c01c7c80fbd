"""The plan of loading a model: its tensors, and the format of each of its weights."""

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
    """`tensors`: all that are not weights of linear maps. `weights`: these, and an embedding of codes, which is a
    whole tied head too, so that such a head is left out.
    """

    tensors: tuple[TensorSpec, ...]
    weights: tuple[tuple[TensorSpec, WeightFormat], ...]

    @classmethod
    def of(cls, spec: ModelSpec, formats: Sequence[WeightFormat]) -> "LoadingPlan":
        """Each weight has the first of `formats` that does not refuse it.

        Raises:
            UnsupportedCheckpointError: all of them refuse one.
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
        """Of a network beside a model, whose embedding and output head are maps like any others. Raises as `of`."""
        found = tuple(tensors)
        weights = ((tensor, choose_format(tensor, formats)) for tensor in found if tensor.is_weight)
        return cls(tuple(tensor for tensor in found if not tensor.is_weight), tuple(weights))

    def stored(self) -> Iterator[TensorSpec]:
        """All that a checkpoint must have. A tied head and the embedding are made of the same."""
        yield from self.tensors
        for weight, weight_format in self.weights:
            yield from weight_format.wants(weight)

    def num_bytes(self, dtype: str) -> int:
        """In memory, for a model of that dtype."""
        kept = [*self.tensors]
        for weight, weight_format in self.weights:
            kept += weight_format.keeps(weight)
        sizes = {tensor.source or Source(tensor.name): num_bytes_of(tensor, dtype) for tensor in kept}
        return sum(sizes.values())


def dtype_of(tensor: TensorSpec, model_dtype: str) -> torch.dtype:
    """That in which a model of `model_dtype` has the tensor."""
    if tensor.code_dtype is not None:
        found: torch.dtype = getattr(torch, tensor.code_dtype)
        return found
    return torch.float32 if tensor.is_float32 else TORCH_DTYPES[model_dtype]


def num_bytes_of(tensor: TensorSpec, model_dtype: str) -> int:
    """In memory, for a model of `model_dtype`."""
    return tensor.size * dtype_of(tensor, model_dtype).itemsize
