"""Rules that decide which weights are quantised: by the modules that a checkpoint's quantisation configuration names,
or by the tensors that it stores.

A `Choice` is a function that returns None for a weight that is quantised, else the reason why it is not.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tandem.architecture.fields import Fields
from tandem.architecture.model import EMBEDDING, HEAD
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import SUM_BLOCK
from tandem.compute.weights.base import Choice, StoredTensors
from tandem.compute.weights.parts import FLOATS, module_of, source_of, tensor_name
from tandem.core.errors import CorruptCheckpointError

_LEAST_GROUP = 8  # inputs; see `coded_matrix.serves` of the compiled kernels
_LINEAR, _REGEX = "Linear", "re:"
_MODEL, _HEAD_MODULE = "model.", HEAD.removesuffix(".weight")
_PREFIXES = ("language_model.model.", "model.language_model.")  # of a text model inside another, in configurations

NamedModules = Callable[[TensorSpec], bool]
"""Function that tells whether a weight's module is one of those that a configuration names."""


def names_of(weight: TensorSpec, renamed: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
    """Names under which a configuration may refer to a weight's module. `renamed`: see `renamed_modules`."""
    module = module_of(weight)
    stored = (renamed[module],) if module in renamed else ()
    if weight.name == HEAD and module != _HEAD_MODULE:  # NOTE: it is the embedding, and a module of its own
        stored = (*stored, _HEAD_MODULE)
    if module.startswith(_MODEL):
        return (module, *(prefix + module.removeprefix(_MODEL) for prefix in _PREFIXES), *stored)
    return module, f"language_model.{module}", *stored


def renamed_modules(stored: StoredTensors | None) -> Mapping[str, str]:
    """Modules with different names in model and checkpoint (experts of Kimi Linear, layers of a `backbone`): the
    checkpoint's name by the model's.
    """
    pairs = {(ours.rpartition(".")[0], tensor.name.rpartition(".")[0]) for ours, tensor in (stored or {}).items()}
    return {ours: name for ours, name in pairs if ours != name}


def compiled(fields: Fields, key: str, pattern: str) -> re.Pattern[str]:
    """The compiled `pattern`, found under `key`. Raises `CorruptCheckpointError` if it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CorruptCheckpointError(
            f"{fields.where}: {key} has {pattern!r}, no regular expression ({error}); correct it"
        ) from error


def checked_group(fields: Fields, key: str, size: int) -> int:
    """Returns `size`. Raises `UnsupportedCheckpointError` if the kernels cannot multiply by codes with a scale for each
    `size` inputs.
    """
    if size % SUM_BLOCK and (SUM_BLOCK % size or size % _LEAST_GROUP):
        raise fields.unsupported(key, f"groups of {_LEAST_GROUP}, 16, 32, 64, {SUM_BLOCK} inputs and its multiples")
    return size


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """Name, class or regular expression by which a configuration names modules. `text`: as in the configuration."""

    text: str
    pattern: re.Pattern[str] | None

    def is_of(self, names: Collection[str]) -> bool:
        """Whether it names the linear map whose module a configuration may call by any of `names`, see `names_of`."""
        if self.pattern is not None:
            return any(self.pattern.match(name) for name in names)
        return self.text == _LINEAR or self.text in names


def read_entries(fields: Fields, key: str) -> tuple[ModuleEntry, ...]:
    """The entries in the list under `key`.

    Raises:
        CorruptCheckpointError: one is no regular expression.
    """

    def entry(text: str) -> ModuleEntry:
        pattern = compiled(fields, key, text.removeprefix(_REGEX)) if text.startswith(_REGEX) else None
        return ModuleEntry(text, pattern)

    return tuple(map(entry, fields.texts(key) or ()))


def named_modules(fields: Fields, key: str, stored: StoredTensors | None = None) -> NamedModules:
    """A function that tells whether a weight's module is among the names, classes and patterns under `key`."""
    renamed, entries = renamed_modules(stored), read_entries(fields, key)

    def contains(weight: TensorSpec) -> bool:
        names = names_of(weight, renamed)
        return any(entry.is_of(names) for entry in entries)

    return contains


def closest_group(
    groups: Mapping[str, Sequence[ModuleEntry]], stored: StoredTensors | None
) -> Callable[[TensorSpec], str | None]:
    """A function that returns the group to which a weight's module belongs, by its name in `groups`; None = no group.

    A module that entries of several groups name belongs to the group that has its own name, else to one with a regular
    expression for it (the alphabetically first), else to one with its class. Of groups with the same entry the last
    counts. So compressed-tensors decides (utils/match.py, `match_targets`).
    """
    renamed = renamed_modules(stored)
    owners = {entry.text: (entry, name) for name, entries in groups.items() for entry in entries}
    ordered = [owners[text] for text in sorted(owners, key=lambda text: (text == _LINEAR, _REGEX in text, text))]

    def find(weight: TensorSpec) -> str | None:
        names = names_of(weight, renamed)
        return next((name for entry, name in ordered if entry.is_of(names)), None)

    return find


def is_within(weight: TensorSpec, modules: Collection[str]) -> bool:
    """Whether the weight's module, or a module that contains it, is in `modules`."""
    return any(f".{name}.".find(f".{module}.") >= 0 for name in names_of(weight) for module in modules)


def where_stored(suffixes: Sequence[str], stored: StoredTensors | None, excluded: Choice | None = None) -> Choice:
    """Chooses the weights of which the checkpoint stores codes, or a tensor with at least one of the suffixes. (Loading
    raises if such a weight lacks the tensor of another suffix.) Before a checkpoint is opened (`stored` is None): all
    except head, routers and weights for which `excluded` gives a reason.
    """

    def choose(weight: TensorSpec) -> str | None:
        if source_of(weight).tensor == EMBEDDING:
            return "the embedding is not coded"
        if stored is not None:
            names = [tensor_name(weight, suffix) for suffix in suffixes]
            is_coded = any(name in stored for name in names) or has_codes(weight, stored)
            return None if is_coded else f"{names[0]} is not stored"
        if weight.name == HEAD or weight.is_small:
            return "heads and routers are not coded"
        return None if excluded is None else excluded(weight)

    return choose


def has_codes(weight: TensorSpec, stored: StoredTensors) -> bool:
    """Whether the checkpoint has a tensor of the weight's own name whose elements are no floats of 16 or 32 bits."""
    found = stored.get(source_of(weight).tensor)
    return found is not None and str(found.dtype).removeprefix("torch.") not in FLOATS


def except_for(modules: Collection[str]) -> Choice:
    """Chooses all weights except those in these modules."""
    return lambda weight: "it is a module that is not converted" if is_within(weight, modules) else None
