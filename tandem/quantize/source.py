"""Unquantised checkpoint as the source of a quantisation: its specs, its tensors as stored or one layer at a time in
float32, and the names and rows that its parameters have in the quantised checkpoint.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from tandem.architecture.families.base import FORMAT_KEYS
from tandem.architecture.fields import Fields, read_json_object
from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Kernels
from tandem.compute.weights.dense import DenseFormat
from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.checkpoint import Checkpoint, open_checkpoint
from tandem.models.fingerprint import compute_fingerprint
from tandem.models.weights import Sources, load_tensor, match_parameters, stored_names

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SourceModel:
    """An unquantised checkpoint.

    Args:
        config: content of `config.json`.
        sources: for each parameter of the specs, the part of a stored tensor that is this parameter.
        fingerprint: of weights and configuration, see `tandem.models.fingerprint`.
    """

    directory: Path
    config: Mapping[str, Any]
    spec: ModelSpec
    checkpoint: Checkpoint
    sources: Sources
    fingerprint: str

    @classmethod
    def open(cls, directory: Path, kernels: Kernels, *, allow_pickle: bool = False) -> "SourceModel":
        """Opens a model directory. Raises `CheckpointError` if the model is not served, or is quantised already."""
        path = directory / "config.json"
        config = read_json_object(path)
        _refuse_coded(directory, Fields(config, str(path)))
        fields = Fields(config, str(path))
        family = find_family(fields)
        model = family.read_model(fields)
        if model.streams is not None:
            raise UnsupportedCheckpointError(
                f"{path}: this {model.family} model has several residual streams, and its weights are not quantised; "
                "serve the checkpoint as it is"
            )
        checkpoint = open_checkpoint(directory, allow_pickle=allow_pickle)
        names = stored_names(checkpoint, family.parameter_name)
        spec, plan, sources = match_parameters(checkpoint, model, (DenseFormat(kernels),), names)
        fingerprint = compute_fingerprint(checkpoint, plan, sources, spec)
        return cls(directory, config, replace(spec, dtype="float32"), checkpoint, sources, fingerprint)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, also used for scales."""
        return self.checkpoint.outline(self.sources[EMBEDDING].tensor).dtype

    def stored(self, name: str) -> torch.Tensor:
        """The whole stored tensor that contains the parameter `name`."""
        return self.checkpoint.tensor(self.sources[name].tensor)

    def load(self, name: str) -> torch.Tensor:
        """Loads a parameter in float32. NOTE: its memory may be the file's, so it must not be written to."""
        return load_tensor(self.checkpoint, self.sources[name], torch.float32, _CPU)

    def load_layer(self, index: int) -> dict[str, torch.Tensor]:
        """Loads all parameters of a layer in float32."""
        return {tensor.name: self.load(tensor.name) for tensor in dict.fromkeys(self.spec.layers[index].tensors())}

    def own_tensors(self, index: int) -> list[TensorSpec]:
        """Parameters of a layer that are written with it: those whose stored tensor no other layer shares, but for
        tables of per-layer embeddings.
        """
        users = self._users()
        return [
            tensor
            for tensor in dict.fromkeys(self.spec.layers[index].tensors())
            if not tensor.is_lookup and users[self.sources[tensor.name].tensor] == 1
        ]

    def own_names(self) -> frozenset[str]:
        """Names of the stored tensors that contain `own_tensors` of any layer."""
        own = (tensor for index in range(self.spec.num_layers) for tensor in self.own_tensors(index))
        return frozenset(self.sources[tensor.name].tensor for tensor in own)

    def head(self) -> torch.Tensor:
        """Weight of the output head, [vocab, hidden], as stored."""
        return self.stored(HEAD)

    @property
    def head_name(self) -> str:
        """Name of the head's tensor in the quantised checkpoint, if it is not tied."""
        return HEAD if self.spec.tie_word_embeddings else self.sources[HEAD].tensor

    def final_norm(self) -> torch.Tensor | None:
        """Weight of the final norm, float32; None = it has none."""
        name = self.spec.final_norm.tensor_name
        return None if name is None else self.load(name)

    def written_name(self, name: str) -> str:
        """Name in the quantised checkpoint of the tensor that contains the parameter `name`. It is the stored name,
        except that the experts of a stacked tensor become separate tensors, since compressed-tensors quantises no
        stacks.
        """
        source, spec = self.sources[name], self._specs[name].source
        if source.index is None or spec is None:
            return source.tensor
        given, ours = source.tensor, spec.tensor
        pairs = zip(reversed(given), reversed(ours), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # NOTE: only beginnings may differ
        begin = ours[: len(ours) - same]
        assert name.startswith(begin)
        return given[: len(given) - same] + name[len(begin) :]

    def written_rows(self, name: str) -> torch.Tensor:
        """Indices of the rows of tensor `written_name` that are the parameter, in order."""
        source, num_rows = self.sources[name], self._specs[name].shape[0] if self._specs[name].shape else 1
        if source.index is not None:
            return torch.arange(num_rows)
        if source.period is None:
            return source.start + source.step * torch.arange(num_rows)
        assert source.stop is not None
        size = source.stop - source.start
        periods = torch.arange(num_rows // size).unsqueeze(1) * source.period
        return (periods + torch.arange(source.start, source.stop)).flatten()

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for layer in self.spec.layers for tensor in layer.tensors()}

    def _users(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for layer in self.spec.layers:
            found.update({self.sources[tensor.name].tensor for tensor in layer.tensors()})
        return found


def module_of(stored_name: str) -> str:
    """Name of a parameter's module: without its last part."""
    return stored_name.removesuffix(".weight")


def _refuse_coded(directory: Path, fields: Fields) -> None:
    for section in filter(None, (fields, fields.section("text_config"))):
        for key in FORMAT_KEYS:
            if section.get(key):
                raise UnsupportedCheckpointError(
                    f"--model={directory}: {fields.where} has {key}, so its weights are codes already; name the "
                    "checkpoint that they were made of"
                )
