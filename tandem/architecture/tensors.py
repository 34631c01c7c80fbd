"""Weights by name: tensors, linear maps and norms, and the part of a checkpoint that each is made of.

A spec never holds numbers. Its names are those under which layers take their weights; they equal the checkpoint's
unless a `Source` says otherwise.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

MAX_RANKS = 8
"""Of a tensor-parallel group; a power of two. Sums that ranks may split are made of as many parts (`sum_blocks`)."""


class ShardAxis(StrEnum):
    """Dimension along which the ranks of a tensor-parallel group split a linear map."""

    COLUMN = "column"  # by outputs
    ROW = "row"  # by inputs: partial sums are added over the ranks
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Source:
    """Part of one tensor of a checkpoint.

    The steps apply in this order: entry `index` of a stack, transposition of the last two dimensions, rows
    `start:stop:step`, columns from the first to the one before the second of `within` (None = all). With a `period`
    they are rows `start:stop` of each `period` rows, as where the heads of several maps lie side by side; of all
    periods, or of those from the first to the one before the second of `periods`.
    """

    tensor: str
    index: int | None = None
    transposed: bool = False
    start: int = 0
    stop: int | None = None
    step: int = 1
    within: tuple[int, int] | None = field(default=None, repr=False)  # NOTE: only shards have some, fingerprints none
    period: int | None = field(default=None, repr=False)  # NOTE: not in fingerprints; a family has one layout
    periods: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether it is the tensor as stored."""
        return self == Source(self.tensor)

    def rows(self, first: int, end: int) -> "Source":
        """Rows `first` to `end - 1` of this part, which has at least so many: with a period, those of whole periods or
        of a single one.
        """
        if self.period is not None:
            return self._rows_of_periods(first, end)
        return replace(self, start=self.start + first * self.step, stop=self.start + (end - 1) * self.step + 1)

    def _rows_of_periods(self, first: int, end: int) -> "Source":
        assert self.stop is not None
        size, skipped = self.stop - self.start, 0 if self.periods is None else self.periods[0]
        period, within = divmod(first, size)
        if within == end % size == 0:
            return replace(self, periods=(skipped + period, skipped + end // size))
        stop = within + end - first
        assert stop <= size, "rows begin in one period and end in another"
        periods = skipped + period, skipped + period + 1
        return replace(self, start=self.start + within, stop=self.start + stop, periods=periods)

    def columns(self, first: int, end: int) -> "Source":
        """Columns `first` to `end - 1` of this part."""
        offset = 0 if self.within is None else self.within[0]
        return replace(self, within=(offset + first, offset + end))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter.

    Args:
        name: in the model.
        source: None = the checkpoint's tensor of that name.
        is_float32: kept in float32 whatever the model's dtype.
        is_small: of a few rows, so that nothing is gained by a packed copy.
        is_lookup: a token reads its row; nothing is multiplied by it as a whole.
        is_weight: of a linear map, so that its format may say which tensors of a checkpoint it is made of.
        sum_blocks: as in a `LinearSpec`.
        code_dtype: that in which a checkpoint has numbers that are no floats, "int8" for example; they stay so.
        is_partial: products with it are one rank's part of a sum over all ranks.
        is_gathered: as in a `LinearSpec`.
    """

    name: str
    shape: tuple[int, ...]
    source: Source | None = None
    is_float32: bool = False
    is_small: bool = False
    is_lookup: bool = False
    is_weight: bool = field(default=False, repr=False)  # NOTE: not in fingerprints, which are made of representations
    code_dtype: str | None = field(default=None, repr=False)
    sum_blocks: int = field(default=1, repr=False)
    is_partial: bool = field(default=False, repr=False)
    is_gathered: bool = field(default=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def num_matrix_elements(tensors: Iterable[TensorSpec]) -> int:
    """Number of elements of all tensors that are no vectors."""
    return sum(tensor.size for tensor in tensors if len(tensor.shape) > 1)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """`x @ weight.T + bias`, with tensors `{name}.weight` [outputs, inputs] and, with `bias`, `{name}.bias` [outputs].

    `weight_source` and `bias_source` say where a checkpoint has them when not under these names. `is_float32`: both are
    kept in float32, and so is the product. `num_ranks`: it is one part of so many of a map that is split along `axis`.
    `is_gathered`: it is a part by outputs, but ranks have parts of its inputs and want all outputs.
    """

    name: str
    outputs: int
    inputs: int
    bias: bool = False
    axis: ShardAxis = ShardAxis.COLUMN
    weight_source: Source | None = None
    bias_source: Source | None = None
    is_float32: bool = False
    num_ranks: int = field(default=1, repr=False)
    is_gathered: bool = field(default=False, repr=False)

    @property
    def sum_blocks(self) -> int:
        """Of equal blocks of inputs, each of which is summed by itself before they are added in a binary tree.

        Sums over inputs that ranks may split have `MAX_RANKS` such blocks, or the next smaller power of two that
        leaves an even number of inputs in each. So a rank's sum of its own blocks is a node of that tree, and the
        bits of a product do not depend on the number of ranks.
        """
        if self.axis is not ShardAxis.ROW:
            return 1
        return max(1, math.gcd(2 * MAX_RANKS, self.inputs * self.num_ranks) // 2) // self.num_ranks

    @property
    def scale(self) -> float:
        """Factor of both the product and the bias."""
        return 1.0

    def times(self, scale: float) -> "LinearSpec":
        """The same map, times `scale`."""
        if scale == 1.0:
            return self
        own = {each.name: getattr(self, each.name) for each in fields(LinearSpec)}
        return ScaledLinearSpec(**own, scale=self.scale * scale)

    def tensors(self) -> Iterator[TensorSpec]:
        """The weight, then the bias if there is one."""
        yield TensorSpec(
            f"{self.name}.weight",
            (self.outputs, self.inputs),
            self.weight_source,
            self.is_float32,
            is_weight=True,
            sum_blocks=self.sum_blocks,
            is_partial=self.axis is ShardAxis.ROW and self.num_ranks > 1,
            is_gathered=self.is_gathered,
        )
        if self.bias:
            yield TensorSpec(f"{self.name}.bias", (self.outputs,), self.bias_source, self.is_float32)


@dataclass(frozen=True, slots=True)
class ScaledLinearSpec(LinearSpec):
    """`(x @ weight.T + bias) * scale`; no call that fuses several products computes it."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Root-mean-square norm over `size` elements, times `{name}.{weight}`, or 1 more than that with `unit_offset`
    (Gemma 3); times nothing where `weight` is None. `within`: of the elements a rank has those from the first number
    to the one before the second, and other ranks the rest; None = it has all.
    """

    name: str
    size: int
    eps: float
    unit_offset: bool = False
    weight: str | None = "weight"
    within: tuple[int, int] | None = field(default=None, repr=False)  # NOTE: only shards have some, fingerprints none

    @property
    def tensor_name(self) -> str | None:
        """Name of its weight; None = it has none."""
        return None if self.weight is None else f"{self.name}.{self.weight}"

    def tensors(self) -> Iterator[TensorSpec]:
        if self.tensor_name is not None:
            yield TensorSpec(self.tensor_name, (self.size,))


@dataclass(frozen=True, slots=True)
class LayerNormSpec:
    """Norm of `size` elements to mean 0 and variance 1, times `{name}.weight`, plus `{name}.bias`."""

    name: str
    size: int
    eps: float

    def tensors(self) -> Iterator[TensorSpec]:
        """The weight, then the bias."""
        yield TensorSpec(f"{self.name}.weight", (self.size,))
        yield TensorSpec(f"{self.name}.bias", (self.size,))
