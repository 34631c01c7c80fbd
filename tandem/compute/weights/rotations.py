"""Rotations of activations for which a checkpoint's weights were made: Hadamard matrices applied to inputs or outputs
of a map.

After compressed_tensors 0.20 (transform/factory): with `location` "input" a map gets `x @ H` instead of `x`, with
"output" it gives `y @ H` instead of `y`. H has Sylvester's matrices of `head_dim` numbers, divided by their root, along
its diagonal. It is computed by butterflies (additions of two numbers), so a row's bits do not depend on other rows.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Experts
from tandem.compute.weights.base import ExpertLinears, Linear, StoredTensors, Weight
from tandem.compute.weights.modules import (
    ModuleEntry,
    NamedModules,
    named_modules,
    names_of,
    read_entries,
    renamed_modules,
)
from tandem.compute.weights.parts import source_of
from tandem.core.errors import UnsupportedCheckpointError

_OFFLINE, _INPUT, _OUTPUT = ("weight_input", "weight_output"), "input", "output"
_CANCELLED = ("k_cache", "q_attn")
_LOCATIONS = (*_OFFLINE, _INPUT, _OUTPUT, *_CANCELLED)


@dataclass(frozen=True, slots=True)
class RotatedWeight:
    """Implements `Weight` with another one. `inputs`, `outputs`: size of the rotated blocks; None = not rotated."""

    inner: Weight
    inputs: int | None
    outputs: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def dtype(self) -> None:
        """None, since it multiplies rows of any float dtype."""

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    @property
    def matrix(self) -> None:
        """None, since calls that fuse products do not rotate."""

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rotated = x if self.inputs is None else rotate_blocks(x, self.inputs).to(x.dtype)
        if self.outputs is None:
            return self.inner(rotated, bias, out_dtype=out_dtype)
        return rotate_blocks(self.inner(rotated, bias, out_dtype=torch.float32), self.outputs).to(out_dtype or x.dtype)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation) -> None:
        """Returns None: there is no such call."""

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        return None


def rotate_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, n] -> float32 of the same shape: each `size` numbers, a power of two, times their Hadamard matrix."""
    wide, step = x.float(), 1
    while step < size:
        pairs = wide.reshape(-1, 2, step)
        wide = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        step *= 2
    return wide.reshape(x.shape).mul(float(size) ** -0.5)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotation of the modules that `targets` name. `of`, `but`: which weights it applies to, with exceptions.
    `size`: numbers of a block; None = all are one block.
    """

    name: str
    is_of_inputs: bool
    size: int | None
    of: NamedModules
    but: NamedModules
    targets: tuple[ModuleEntry, ...]

    def block(self, weight: TensorSpec) -> int | None:
        """Size of the blocks of this weight's rotation; None = the rotation does not apply to it.

        Raises:
            UnsupportedCheckpointError: there is no Hadamard matrix of that size.
        """
        if not self.of(weight) or self.but(weight):
            return None
        count = weight.shape[1 if self.is_of_inputs else 0]
        size = self.size or count
        if count % size or size & size - 1 or not (self.is_of_inputs or source_of(weight).is_whole):
            raise UnsupportedCheckpointError(
                f"transform_config: {self.name} rotates {count} {'inputs' if self.is_of_inputs else 'outputs'} of "
                f"{weight.name} by {size}; powers of two that divide them are served, of a tensor of its own"
            )
        return size


@dataclass(frozen=True, slots=True)
class Rotations:
    """All rotations of a checkpoint's weights and activations.

    Args:
        suffixes: suffixes of tensors that hold the matrices, which need not be read.
        name: identifies the rotations in fingerprints.
        renamed: see `renamed_modules`.
    """

    found: tuple[Rotation, ...] = ()
    suffixes: tuple[str, ...] = ()
    name: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def rotated(self, weight: TensorSpec, inner: Weight) -> Weight:
        """`inner` with the rotations of its inputs and outputs, if the weight has any."""
        blocks = self._blocks(weight, is_of_inputs=True), self._blocks(weight, is_of_inputs=False)
        return inner if blocks == (None, None) else RotatedWeight(inner, *blocks)

    def has(self, weight: TensorSpec) -> bool:
        """Whether the weight has a rotation."""
        return any(rotation.of(weight) and not rotation.but(weight) for rotation in self.found)

    def check_targets(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """Raises `UnsupportedCheckpointError` if a rotation is of modules that do not exist: without it a model would
        give nonsense. `weights`, `others`: as in `WeightFormat.check_model`.
        """
        modules = [*(names_of(weight, self.renamed) for weight in weights), *((name,) for name in others)]
        for rotation in self.found:
            for entry in rotation.targets:
                if not any(entry.is_of(names) for names in modules):
                    raise UnsupportedCheckpointError(
                        f"transform_config: {rotation.name} has the target {entry.text!r}, which is none of the linear "
                        "maps of this model; correct it, or take it out if the weights were made without it"
                    )

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the stored tensor is a rotation's matrix, equal to the one computed here."""
        if not self.suffixes or not name.endswith(self.suffixes) or tensor.dim() != 2:
            return False
        size = tensor.shape[0]
        is_served = tensor.shape[1] == size and not size & size - 1
        return is_served and torch.equal(
            (rotate_blocks(torch.eye(size), size) * float(size) ** 0.5).round(), tensor.float()
        )

    def _blocks(self, weight: TensorSpec, *, is_of_inputs: bool) -> int | None:
        sizes = [each.block(weight) for each in self.found if each.is_of_inputs is is_of_inputs]
        found = [size for size in sizes if size is not None]
        if len(found) > 1:
            raise UnsupportedCheckpointError(
                f"transform_config rotates {weight.name} {len(found)} times on one side; once is served"
            )
        return found[0] if found else None


NO_ROTATIONS = Rotations()


def read_rotations(quantisation: Fields, stored: StoredTensors | None) -> Rotations:
    """Reads a `transform_config`. Rotations of weights are already merged into them; those of queries and keys cancel
    out.

    Args:
        stored: the checkpoint's tensors, whose module names the configuration uses.

    Raises:
        UnsupportedCheckpointError: a kind or location of rotation that is not supported.
    """
    config = quantisation.section("transform_config")
    groups = None if config is None else config.section("config_groups")
    found, suffixes = [], []
    for name in () if groups is None else tuple(groups.unread()):
        scheme = None if groups is None else groups.section(name)
        if scheme is None:
            continue
        online = [part for part in _applications(scheme) if part.text("location") not in _OFFLINE]
        if online:
            scheme.only("type", ("hadamard",), "hadamard, of activations")
            scheme.only("randomize", (False,), "false, of activations")
        _check_cancelled(scheme, online)
        for part in online:
            location = str(part.text("location"))
            suffixes.append(f".{name}_{location}.weight")
            if location not in _CANCELLED:
                of, but = (named_modules(part, key, stored) for key in ("targets", "ignore"))
                targets, size = read_entries(part, "targets"), scheme.optional_count("head_dim")
                found.append(Rotation(name, location == _INPUT, size, of, but, targets))
    if not found:
        return replace(NO_ROTATIONS, suffixes=tuple(suffixes))
    text = json.dumps(quantisation.get("transform_config"), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Rotations(tuple(found), tuple(suffixes), f"-rotated-{digest}", renamed_modules(stored))


def _applications(scheme: Fields) -> list[Fields]:
    parts = scheme.get("apply")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise scheme.wrong("apply", "a list of objects")
    found = [Fields(part, f"{scheme.where}: apply") for part in parts]
    for part in found:
        if part.text("location") not in _LOCATIONS:
            raise part.unsupported("location", ", ".join(_LOCATIONS))
    return found


def _check_cancelled(scheme: Fields, online: Sequence[Fields]) -> None:
    """Checks that queries and keys are rotated by the same matrix, so that their products do not change."""
    sides = {str(part.text("location")): part for part in online if part.text("location") in _CANCELLED}
    if not sides:
        return
    kept = [[part.texts(key) for key in ("targets", "ignore")] for part in sides.values()]
    if len(sides) != len(_CANCELLED) or kept[0] != kept[1] or len(online) != len(sides):
        raise scheme.unsupported("apply", "k_cache and q_attn together, of the same modules, in a group of their own")
