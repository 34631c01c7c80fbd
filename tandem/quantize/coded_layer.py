"""One layer's weights as codes, and the tensors of a checkpoint that they and the layer's other parameters become."""

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
    """Relative errors of one coded weight: of its numbers, and of its outputs where calibration has seen its inputs."""

    name: str
    of_numbers: float
    of_outputs: float | None


@dataclass(frozen=True, slots=True)
class GridWeight:
    """A weight and the grid to which it was rounded."""

    rounded: Rounded
    grid: Grid


def coded_inputs(model: SourceModel, index: int) -> tuple[SharedInput, ...]:
    """The inputs whose weights are coded: all but those that other layers share."""
    own = {tensor.name for tensor in model.own_tensors(index)}
    return tuple(shared for shared in shared_inputs(model.spec.layers[index]) if own.issuperset(shared.weights))


def to_stored(
    model: SourceModel, index: int, coded: Mapping[str, GridWeight], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The layer's tensors by the checkpoint's names; `tensors` are its parameters in float32."""
    found: dict[str, torch.Tensor] = {}
    for stored_name, names in _by_stored(model, [tensor.name for tensor in model.own_tensors(index)]).items():
        if names[0] not in coded:
            dtype = model.checkpoint.outline(stored_name).dtype
            found[stored_name] = torch.cat([tensors[name] for name in names]).to(dtype)
            continue
        parts = [coded[name] for name in names]
        numbers = torch.cat([part.rounded.numbers for part in parts])
        scales = torch.cat([part.rounded.scales for part in parts])
        for suffix, tensor in parts[0].grid.stored(numbers, scales).items():
            found[f"{module_of(stored_name)}.{suffix}"] = tensor
    return found


def from_stored(
    model: SourceModel, index: int, grid: Grid, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The layer's parameters in float32 out of tensors that `to_stored` made, and of those that it left out."""
    found: dict[str, torch.Tensor] = {}
    is_coded = {name for shared in coded_inputs(model, index) for name in shared.weights}
    shapes = {tensor.name: tensor.shape for tensor in model.spec.layers[index].tensors()}
    own = [tensor.name for tensor in model.own_tensors(index)]
    for stored_name, names in _by_stored(model, own).items():
        if names[0] in is_coded:
            prefix = f"{module_of(stored_name)}."
            parts = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
            whole = grid.read(parts, shapes[names[0]][1])
        else:
            whole = stored[stored_name].float()
        found.update(zip(names, torch.split(whole, [shapes[name][0] for name in names]), strict=True))
    others = shapes.keys() - found.keys()
    return found | {name: model.load(name) for name in others}


def write_errors(errors: Sequence[WeightError]) -> str:
    """Errors as JSON, so that a resumed run can report them."""
    return json.dumps([asdict(error) for error in errors])


def read_errors(text: str) -> list[WeightError]:
    """Inverse of `write_errors`."""
    return [WeightError(**entry) for entry in json.loads(text)]


def _by_stored(model: SourceModel, names: Sequence[str]) -> dict[str, list[str]]:
    """Maps stored tensors to the parameters in their rows, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: model.sources[name].start):
        found[model.sources[name].tensor].append(name)
    return found
