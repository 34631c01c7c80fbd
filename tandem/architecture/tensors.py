"""Specs of named weights: tensors, linear maps and norms, and the part of a checkpoint from which each is loaded.

A spec never holds numbers. Its names are those that layers use; they equal the checkpoint's names unless a `Source`
says otherwise.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

MAX_RANKS = 8
"""Of a tensor-parallel group; a power of two. Sums that ranks may split are made of as many parts (`sum_blocks`)."""
MAX_GROUP_RANKS = 16
"""Of a worker: tensor-parallel ranks x pipeline stages x contexts; `kMaxRanks` of the compiled exchanges."""


class ShardAxis(StrEnum):
    """Dimension along which the ranks of a tensor-parallel group split a linear map."""

    COLUMN = "column"  # by outputs
    ROW = "row"  # by inputs: partial sums are added over the ranks
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Source:
    """Part of one tensor of a checkpoint, from which a weight is taken.

    The steps apply in this order: item `index` of a stack, transposition of the last two dimensions, rows
    `start:stop:step`, columns `within[0]` to `within[1] - 1` (None = all). With a `period` the rows are `start:stop` of
    each `period` rows, as if the heads of several maps were interleaved; of all periods, or only of periods
    `periods[0]` to `periods[1] - 1`.
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
        """Whether it is the whole tensor as stored."""
        return self == Source(self.tensor)

    def rows(self, first: int, end: int) -> "Source":
        """Rows `first` to `end - 1` of this part, which has at least `end`. With a `period`, they must be those of
        whole periods, or lie within a single one.
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
    """One parameter of the model.

    Args:
        name: name in the model.
        source: where it is in the checkpoint; None = the whole tensor of that name.
        is_float32: kept in float32 whatever the model's dtype.
        is_small: has few rows, so that nothing is gained by a packed copy.
        is_lookup: a table of which a token reads a row; nothing is multiplied by it as a whole.
        is_weight: belongs to a linear map, so that a quantised format may store it as other tensors.
        sum_blocks: as in a `LinearSpec`.
        code_dtype: dtype of a tensor whose numbers are not floats, such as "int8"; they are kept as they are.
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
    """Number of elements of all tensors except vectors."""
    return sum(tensor.size for tensor in tensors if len(tensor.shape) > 1)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """`x @ weight.T + bias`, with tensors `{name}.weight` [outputs, inputs] and, with `bias`, `{name}.bias` [outputs].

    Args:
        axis: dimension along which ranks split the map.
        weight_source, bias_source: where a checkpoint has them if not under these names.
        is_float32: weight, bias and product are in float32.
        num_ranks: the map is one rank's part of a map that so many ranks split.
        is_gathered: it is a part by outputs, but its inputs are divided among ranks and all outputs are needed on each.
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
        """Number of equal blocks of inputs. Each block is summed separately, then the sums are added in a binary tree.

        Sums over inputs that ranks may split have `MAX_RANKS` such blocks, or the next smaller power of two that
        leaves an even number of inputs in each. So a rank's sum of its own blocks is a node of that tree, and the
        bits of a product do not depend on the number of ranks.
        """
        if self.axis is not ShardAxis.ROW:
            return 1
        return max(1, math.gcd(2 * MAX_RANKS, self.inputs * self.num_ranks) // 2) // self.num_ranks

    @property
    def scale(self) -> float:
        """Factor of the product and the bias."""
        return 1.0

    def times(self, scale: float) -> "LinearSpec":
        """This map with its outputs multiplied by `scale`."""
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
    """`(x @ weight.T + bias) * scale`. Kernels that fuse several products do not support it."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Root-mean-square norm over `size` elements, times `{name}.{weight}` (`1 + weight` with `unit_offset`, Gemma 3),
    or without a factor if `weight` is None. `within`: a rank has elements `within[0]` to `within[1] - 1`, and other
    ranks the rest; None = it has all.
    """

    name: str
    size: int
    eps: float
    unit_offset: bool = False
    weight: str | None = "weight"
    within: tuple[int, int] | None = field(default=None, repr=False)  # NOTE: only shards have some, fingerprints none

    @property
    def tensor_name(self) -> str | None:
        """Name of its weight; None = it has no weight."""
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
