"""Rules that choose the weights of a coding: by names of modules in a configuration, and by what a checkpoint stores."""

import re
from collections.abc import Collection

from tandem.architecture.fields import Fields
from tandem.architecture.model import EMBEDDING, HEAD
from tandem.architecture.tensors import TensorSpec
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.coded import Choice
from tandem.compute.weights.parts import module_of, source_of, tensor_name
from tandem.core.errors import CorruptCheckpointError

_MODEL = "model."
_PREFIXES = ("language_model.model.", "model.language_model.")  # of a text model inside another, in configurations


def names_of(weight: TensorSpec) -> tuple[str, ...]:
    """Those that a configuration may have for the module of a weight."""
    module = module_of(weight)
    if module.startswith(_MODEL):
        return (module, *(prefix + module.removeprefix(_MODEL) for prefix in _PREFIXES))
    return module, f"language_model.{module}"


def compiled(fields: Fields, key: str, pattern: str) -> re.Pattern[str]:
    """Raises `CorruptCheckpointError` where `pattern`, of the key, is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CorruptCheckpointError(
            f"{fields.where}: {key} has {pattern!r}, no regular expression: {error}"
        ) from error


def is_within(weight: TensorSpec, modules: Collection[str]) -> bool:
    """Whether the weight's module, or one that it is part of, is among those."""
    return any(f".{name}.".find(f".{module}.") >= 0 for name in names_of(weight) for module in modules)


def where_stored(suffix: str, stored: StoredTensors | None, excluded: Choice | None = None) -> Choice:
    """The weights for which a checkpoint has the tensor of that suffix; as long as none is open, all but head, routers
    and those that `excluded` refuses.
    """

    def choose(weight: TensorSpec) -> str | None:
        if source_of(weight).tensor == EMBEDDING:
            return "the embedding is not coded"
        if stored is not None:
            name = tensor_name(weight, suffix)
            return None if name in stored else f"{name} is not stored"
        if weight.name == HEAD or weight.is_small:
            return "heads and routers are not coded"
        return None if excluded is None else excluded(weight)

    return choose
