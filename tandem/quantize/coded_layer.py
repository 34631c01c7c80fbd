"""Converts one layer from parameters in float32 to the tensors of a quantised checkpoint, and back.

Weights that are quantised are called coded.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from tandem.quantize.grids import Grid
from tandem.quantize.inputs import SharedInput, shared_inputs
from tandem.quantize.rounding import Rounded
from tandem.quantize.source import SourceModel, module_of


@dataclass(frozen=True, slots=True)
class WeightError:
    """Relative errors of one quantised weight: of its numbers, and of its outputs if calibration has seen its inputs.

    Args:
        num_rows: input rows that calibration has seen; None = the method uses none.
        is_fallback: there were too few for the method, so the weight was rounded to the nearest.
    """

    name: str
    of_numbers: float
    of_outputs: float | None
    num_rows: int | None = None
    is_fallback: bool = False


@dataclass(frozen=True, slots=True)
class GridWeight:
    """A rounded weight, and the grid to which it was rounded."""

    rounded: Rounded
    grid: Grid


def coded_inputs(model: SourceModel, index: int) -> tuple[SharedInput, ...]:
    """Inputs of a layer whose weights are quantised: all whose stored tensors no other layer shares."""
    own = {tensor.name for tensor in model.own_tensors(index)}
    return tuple(shared for shared in shared_inputs(model.spec.layers[index]) if own.issuperset(shared.weights))


def to_stored(
    model: SourceModel, index: int, coded: Mapping[str, GridWeight], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The layer's tensors by the checkpoint's names, from its quantised weights `coded` and all its parameters,
    float32.
    """
    found: dict[str, torch.Tensor] = {}
    for written, names in _by_written(model, [tensor.name for tensor in model.own_tensors(index)]).items():
        rows = [model.written_rows(name) for name in names]
        if names[0] not in coded:
            dtype = model.checkpoint.outline(model.sources[names[0]].tensor).dtype
            found[written] = _placed([tensors[name] for name in names], rows).to(dtype)
            continue
        parts = [coded[name] for name in names]
        numbers = _placed([part.rounded.numbers for part in parts], rows)
        scales = _placed([part.rounded.scales for part in parts], rows)
        for suffix, tensor in parts[0].grid.stored(numbers, scales).items():
            found[f"{module_of(written)}.{suffix}"] = tensor
    return found


def _placed(parts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that consists of `parts`, each at the given `rows`."""
    whole = torch.cat(list(parts))
    order = torch.cat(list(rows))
    found = torch.empty_like(whole)
    found[order] = whole
    return found


def from_stored(
    model: SourceModel, index: int, grid: Grid, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The layer's parameters in float32, decoded from tensors that `to_stored` made. Parameters shared with other
    layers are loaded from the source.
    """
    found: dict[str, torch.Tensor] = {}
    is_coded = {name for shared in coded_inputs(model, index) for name in shared.weights}
    shapes = {tensor.name: tensor.shape for tensor in model.spec.layers[index].tensors()}
    own = [tensor.name for tensor in model.own_tensors(index)]
    for written, names in _by_written(model, own).items():
        if names[0] in is_coded:
            prefix = f"{module_of(written)}."
            parts = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
            whole = grid.read(parts, shapes[names[0]][1])
        else:
            whole = stored[written].float()
        found.update({name: whole[model.written_rows(name)] for name in names})
    others = shapes.keys() - found.keys()
    return found | {name: model.load(name) for name in others}


def write_errors(errors: Sequence[WeightError]) -> str:
    """Errors as JSON, so that a resumed run can report them."""
    return json.dumps([asdict(error) for error in errors])


def read_errors(text: str) -> list[WeightError]:
    """Inverse of `write_errors`."""
    return [WeightError(**entry) for entry in json.loads(text)]


def _by_written(model: SourceModel, names: Sequence[str]) -> dict[str, list[str]]:
    """Maps tensors of the quantised checkpoint to the parameters in their rows."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[model.written_name(name)].append(name)
    return found
