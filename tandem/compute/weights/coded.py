"""Quantised weights (codes with scales): the interface of their stored formats, the product with them, and their packed
form.

A `Coding` knows how a checkpoint stores one kind of quantised weight. `CodedFormat` makes a `WeightFormat` from it and
the rule by which a configuration chooses weights for it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from tandem.architecture.cost import Products
from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CODE_DTYPES, SUPER_DTYPE, TABLE_SIZE, CodedMatrix, CodeKind
from tandem.compute.ops import Experts, Kernels
from tandem.compute.order import Order
from tandem.compute.weights.base import Choice, ExpertLinears, Linear, Pieces, Weight, expert_weights
from tandem.compute.weights.parts import source_of
from tandem.compute.weights.rotations import NO_ROTATIONS, Rotations
from tandem.core.errors import UnsupportedCheckpointError

_ALIGNMENT = 64  # bytes of a cache line
_PRODUCTS = {
    CodeKind.TABLE4: Products.FOUR_BITS,
    CodeKind.INT8: Products.INT8,
    CodeKind.E4M3: Products.FP8,
}
_PIECE_BYTES = 1 << 20  # of a weight that are read and packed at a time
_PIECE_ROWS = 128  # pieces have multiples of so many rows, which no format needs to divide
_OF_ALL_ROWS = ("table", "permutation")

_RANGES = (  # suffixes of scales for activations and the KV cache, which no product here reads
    *(f".{name}_{value}" for name in ("input", "output", "q", "k", "v", "prob") for value in ("scale", "zero_point")),
    ".input_global_scale",
    ".activation_scale",
)


@dataclass(frozen=True, slots=True)
class CodedLayout:
    """Layout of a `CodedMatrix` without its numbers. `offsets`: their dtype, None = none. `super_size`: inputs that
    share the unit of int8 scales and offsets, 0 = no super-blocks.
    """

    kind: CodeKind
    shape: tuple[int, int]
    group_size: int
    scales: torch.dtype
    offsets: torch.dtype | None = None
    is_permuted: bool = False
    super_size: int = 0

    def sketch(self) -> CodedMatrix:
        """A matrix of this layout without numbers, on the meta device."""
        (outputs, inputs), is_table = self.shape, self.kind is CodeKind.TABLE4
        scales = (outputs, -(-inputs // self.group_size))
        width = -(-inputs // 2) if is_table else inputs
        supers = (outputs, -(-inputs // self.super_size)) if self.super_size else None
        return CodedMatrix(
            kind=self.kind,
            shape=self.shape,
            codes=_sketched((outputs, width), CODE_DTYPES[self.kind]),
            scales=_sketched(scales, self.scales),
            group_size=self.group_size,
            table=_sketched((TABLE_SIZE,), torch.float32) if is_table else None,
            offsets=None if self.offsets is None else _sketched(scales, self.offsets),
            super_scales=_sketched(supers, SUPER_DTYPE) if supers and self.scales == torch.int8 else None,
            super_offsets=_sketched(supers, SUPER_DTYPE) if supers and self.offsets == torch.int8 else None,
            super_size=self.super_size,
            permutation=_sketched((inputs,), torch.int64) if self.is_permuted else None,
        )

    def is_of(self, matrix: CodedMatrix) -> bool:
        """Whether the matrix has this layout."""
        sketch, offsets = self.sketch(), None if matrix.offsets is None else matrix.offsets.dtype
        return (
            (matrix.kind, matrix.shape, matrix.group_size) == (self.kind, self.shape, self.group_size)
            and matrix.super_size == self.super_size
            and (matrix.scales.dtype, offsets) == (self.scales, self.offsets)
            and [name for name, _ in matrix.tensors()] == [name for name, _ in sketch.tensors()]
        )


class Coding(Protocol):
    """Format in which a checkpoint stores the codes and scales of a weight."""

    @property
    def name(self) -> str:
        """Name in fingerprints and messages; different for codings that give the same bytes different meanings."""
        ...

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """Specs of the checkpoint's tensors from which the weight is made, see `WeightFormat`."""
        ...

    def layout(self, weight: TensorSpec) -> CodedLayout:
        """Layout of the matrix that `read` returns."""
        ...

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        """The weight's matrix, from the tensors of `checkpoint_tensors`.

        Raises:
            CorruptCheckpointError: numbers in them are impossible, or contradict the configuration.
        """
        ...


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Implements `Weight` with a quantised matrix."""

    is_packed: ClassVar[bool] = True  # where the kernels can
    products: ClassVar[Products | None] = None  # None = those of the codes decoded in registers

    coded: CodedMatrix
    kernels: Kernels

    @property
    def shape(self) -> tuple[int, int]:
        return self.coded.shape

    @property
    def dtype(self) -> None:
        """None, since it multiplies rows of any float dtype."""

    @property
    def num_bytes(self) -> int:
        return self.coded.num_bytes

    @property
    def matrix(self) -> CodedMatrix | None:
        return self.coded

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.kernels.coded_linear(x, self.coded, bias, out_dtype=out_dtype)

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation
    ) -> torch.Tensor | None:
        mine, other = self.matrix, up.weight.matrix
        if mine is None or not isinstance(other, CodedMatrix):
            return None
        return self.kernels.coded_gated_linear(x, mine, other, activation, bias, up.bias)

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        found = expert_weights(experts)
        return None if found is None else self.kernels.experts(activation, clamp, found)


Product = type[CodedWeight]
"""The class of a weight, by which it is multiplied."""


@dataclass(frozen=True, slots=True)
class CodedFormat:
    """Implements `WeightFormat` with a `Coding`. `choice`: decides which weights have it. `has_tables`: embeddings may
    have it, too. `rounds_rows`: as in a `CodedMatrix`. `product`: class of the loaded weights.
    """

    coding: Coding
    choice: Choice
    kernels: Kernels
    product: "Product" = CodedWeight
    rotations: Rotations = NO_ROTATIONS
    has_tables: bool = False
    rounds_rows: bool = False

    @property
    def name(self) -> str:
        product = "" if self.product is CodedWeight else f"-{self.product.__name__}"
        rounding = "-int8-activations" if self.rounds_rows else ""
        return f"{self.coding.name}{product}{self.rotations.name}{rounding}"

    @property
    def packed(self) -> "PackedCoded":
        return PackedCoded(self.coding, self.kernels, self.product, self.rotations, self.rounds_rows)

    def refusal(self, weight: TensorSpec) -> str | None:
        return self.choice(weight)

    def has_table(self, table: TensorSpec) -> bool:
        return self.has_tables and self.choice(table) is None

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        self.rotations.check_targets(weights, others)

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        """Some writers add a bias of zeros to every map."""
        is_harmless = name.endswith(_RANGES) or (name.endswith(".bias") and not tensor.any())
        return is_harmless or self.rotations.holds(name, tensor)

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return self.coding.checkpoint_tensors(weight)

    def memory_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return self.packed.stored(weight)

    def products(self, weight: TensorSpec) -> Products:
        return self.product.products or _PRODUCTS[self.coding.layout(weight).kind]

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return self.packed.pieces(weight)

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        return self.packed.made(weight, joined(self.packed.sketch(weight), self.packed.matrices(weight, pieces)))


@dataclass(frozen=True, slots=True)
class PackedCoded:
    """Implements `PackedForm`: one tensor of bytes for a weight, in which each of its tensors begins a cache line."""

    coding: Coding
    kernels: Kernels
    product: "Product"
    rotations: Rotations
    rounds_rows: bool

    @property
    def layout(self) -> str:
        """NOTE: each implementation of `Kernels` has its own."""
        return f"codes-of-{type(self.kernels).__name__}/1"

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        return None

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        size = _ALIGNMENT + sum(_padded(tensor.nbytes) for _, tensor in self.sketch(weight).tensors())
        return (replace(weight, shape=(size,), source=None, is_float32=False, code_dtype="uint8"),)

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """NOTE: outputs that share a row of zero points or a block of scales stay together. Codes that are not packed
        are one piece, since they may be used in the mapped file.
        """
        (outputs, _), source = weight.shape, source_of(weight)
        if self.sketch(weight).order is Order.ROWS or source.period is not None:
            return (weight,)
        num_bytes = sum(tensor.nbytes for _, tensor in self.sketch(weight).tensors())
        rows = max(1, _PIECE_BYTES * outputs // num_bytes // _PIECE_ROWS) * _PIECE_ROWS
        bounds = [(start, min(start + rows, outputs)) for start in range(0, outputs, rows)]
        found = tuple(
            replace(weight, shape=(end - start, weight.shape[1]), source=source.rows(start, end))
            for start, end in bounds
        )
        try:
            for piece in found:
                self.coding.checkpoint_tensors(piece)
        except UnsupportedCheckpointError:
            return (weight,)
        return found if len(found) > 1 else (weight,)

    def matrices(self, weight: TensorSpec, pieces: Pieces) -> Iterator[CodedMatrix]:
        """The matrix of each piece, packed in the order that the product reads fastest."""
        remaining = iter(pieces)
        for piece in self.pieces(weight):
            yield self.arranged(self.read(piece, next(remaining)))  # NOTE: no name keeps what is read, nor does a zip
        assert next(remaining, None) is None

    def pack(self, weight: TensorSpec, pieces: Pieces) -> Iterator[torch.Tensor]:
        """NOTE: codes are written piece by piece; scales and the rest follow after the last of them."""
        others: dict[str, list[torch.Tensor]] = {}
        sketch, factor = dict(self.sketch(weight).tensors()), 1.0
        for matrix in self.matrices(weight, pieces):
            yield _bytes_of(matrix.codes)
            factor = matrix.factor
            for name, tensor in matrix.tensors():
                if name in _OF_ALL_ROWS:
                    others[name] = [tensor]
                elif name != "codes":
                    others.setdefault(name, []).append(tensor)
        for name, tensor in sketch.items():
            yield from map(_bytes_of, others.get(name, ()))
            yield torch.zeros(_padded(tensor.nbytes) - tensor.nbytes, dtype=torch.uint8)
        yield _bytes_of(torch.nn.functional.pad(torch.tensor([factor]), (0, _ALIGNMENT // 4 - 1)))

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        packed, sketch = parts[weight.name], self.sketch(weight)
        assert packed.data_ptr() % _ALIGNMENT == 0, "it begins at a cache line"
        factor = float(packed[-_ALIGNMENT:].view(torch.float32)[0])
        return self.made(weight, replace(_with(sketch, dict(_views(packed, sketch))), factor=factor))

    def made(self, weight: TensorSpec, coded: CodedMatrix) -> Weight:
        """The weight with these codes, and with its rotations if it has any."""
        if self.rounds_rows and coded.has_integers:
            coded = replace(coded, rounds_rows=True)
        return self.rotations.rotated(weight, self.product(coded, self.kernels))

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        """The matrix in row order, on the device of `parts`. NOTE: codings rearrange bits on the CPU."""
        device = next(iter(parts.values())).device
        coded = self.coding.read(weight, {name: part.cpu() for name, part in parts.items()})
        assert self.coding.layout(weight).is_of(coded), f"{self.coding.name} has said something else of {weight.name}"
        return _with(coded, {name: tensor.to(device).contiguous() for name, tensor in coded.tensors()})

    def arranged(self, matrix: CodedMatrix) -> CodedMatrix:
        """The matrix packed in the order that the product reads fastest."""
        if self.product.is_packed and self.kernels.can_pack_coded(matrix):
            return self.kernels.pack_coded(matrix)
        return matrix

    def sketch(self, weight: TensorSpec) -> CodedMatrix:
        """The packed matrix without numbers, on the meta device, with the shapes of the file's tensors."""
        return self.arranged(self.coding.layout(weight).sketch())


def joined(sketch: CodedMatrix, matrices: Iterator[CodedMatrix]) -> CodedMatrix:
    """Concatenates matrices of consecutive rows. `sketch`: the whole matrix without numbers."""
    whole: dict[str, torch.Tensor] = {}
    ends: dict[str, int] = {}
    factor = 1.0
    for matrix in matrices:
        if matrix.shape == sketch.shape:
            return matrix
        for name, tensor in matrix.tensors():
            if name in _OF_ALL_ROWS:
                whole[name] = tensor
                continue
            if name not in whole:
                whole[name] = torch.empty(getattr(sketch, name).shape, dtype=tensor.dtype, device=tensor.device)
            start = ends.get(name, 0)
            ends[name] = start + len(tensor)
            whole[name][start : ends[name]] = tensor
        factor = matrix.factor
    assert all(end == len(whole[name]) for name, end in ends.items())
    return replace(_with(sketch, whole), factor=factor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _with(matrix: CodedMatrix, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
    """The matrix with its tensors replaced by `tensors`."""
    return replace(
        matrix,
        codes=tensors["codes"],
        scales=tensors["scales"],
        table=tensors.get("table"),
        offsets=tensors.get("offsets"),
        super_scales=tensors.get("super_scales"),
        super_offsets=tensors.get("super_offsets"),
        permutation=tensors.get("permutation"),
    )


def _views(packed: torch.Tensor, sketch: CodedMatrix) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the bytes as the tensors of the sketch, by name."""
    start = 0
    for name, tensor in sketch.tensors():
        yield name, packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _padded(tensor.nbytes)


def _sketched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
