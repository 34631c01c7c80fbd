"""Splits of linear maps among the ranks of a tensor-parallel group. Where a map cannot be split, `IndivisibleError`
says why.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from tandem.architecture.tensors import LinearSpec, ShardAxis, Source


class IndivisibleError(Exception):
    """A model cannot be split into that many shards; the message says why."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """Share of rank `rank` of `num_ranks` in a model. `coded`: names of the quantised weights."""

    rank: int
    num_ranks: int
    coded: Collection[str]

    def share(self, number: int, name: str) -> int:
        """A rank's share of `number`; the error message calls it `name`."""
        if number % self.num_ranks:
            raise IndivisibleError(f"{name}={number}, which {self.num_ranks} ranks do not divide")
        return number // self.num_ranks

    def by_outputs(self, spec: LinearSpec) -> LinearSpec:
        """A rank's part of the map: consecutive outputs, with their biases."""
        return by_outputs(spec, self.rank, self.num_ranks)

    def by_inputs(self, spec: LinearSpec) -> LinearSpec:
        """A rank's part of the map: consecutive inputs, whose sum is a node of the fixed tree in which all inputs are
        added (`LinearSpec.sum_blocks`). The bias is added once, to the sum over all ranks.

        A quantised map is split by outputs instead, and the inputs of all ranks are gathered.
        """
        if f"{spec.name}.weight" in self.coded:
            return replace(self.by_outputs(spec), axis=ShardAxis.COLUMN, is_gathered=True)
        if spec.sum_blocks % self.num_ranks:
            raise IndivisibleError(
                f"{spec.inputs} inputs of {spec.name}, which {self.num_ranks} ranks do not divide into parts of an "
                "even size"
            )
        size = spec.inputs // self.num_ranks
        weight = spec.weight_source or Source(f"{spec.name}.weight")
        columns = weight.columns(self.rank * size, (self.rank + 1) * size)
        return replace(spec, inputs=size, weight_source=columns, num_ranks=self.num_ranks)


def by_outputs(spec: LinearSpec, part: int, num_parts: int) -> LinearSpec:
    """Part `part` of `num_parts` of the outputs of a map, with their biases."""
    if spec.outputs % num_parts:
        raise IndivisibleError(f"{spec.outputs} outputs of {spec.name}, which {num_parts} ranks do not divide")
    size = spec.outputs // num_parts
    rows = part * size, (part + 1) * size
    weight = spec.weight_source or Source(f"{spec.name}.weight")
    bias = spec.bias_source or Source(f"{spec.name}.bias")
    return replace(
        spec,
        outputs=size,
        weight_source=weight.rows(*rows),
        bias_source=bias.rows(*rows) if spec.bias else spec.bias_source,
        num_ranks=num_parts,
    )
