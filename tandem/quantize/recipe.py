"""Recipe: the options of quantising a checkpoint, namely format of the weights, rounding method and rotation."""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from tandem.architecture.model import ModelSpec
from tandem.core.errors import ConfigurationError
from tandem.quantize.grids import Fp8Grid, Grid, IntegerGrid, Mxfp4Grid, Nvfp4Grid
from tandem.quantize.inputs import shared_inputs

FormatName = Literal["int8", "int4", "fp8", "mxfp4", "nvfp4"]
Method = Literal["rtn", "gptq", "awq"]

CHANNEL: Final = 0  # group size that stands for one scale per output
_INTEGER_BITS: Final = {"int8": 8, "int4": 4}
_USUAL_GROUPS: Final = {"int8": CHANNEL, "int4": 64}
_SCALE_DTYPES: Final = (torch.bfloat16, torch.float16)
_WORD_BITS: Final = 32  # integer codes are packed into words
_SMALLEST_GROUP: Final = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of quantising a checkpoint.

    Args:
        method: rtn (round to nearest), gptq or awq.
        group_size: inputs that share a scale, `CHANNEL` = all inputs of an output; None = the format's usual size.
        rotate: merge QuaRot's rotations into the weights.
    """

    format: FormatName
    method: Method
    group_size: int | None = None
    rotate: bool = False

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of the weights, for a checkpoint of that dtype.

        Raises:
            ConfigurationError: the format does not allow groups of that size.
        """
        scale_dtype = dtype if dtype in _SCALE_DTYPES else torch.bfloat16
        if self.format in _INTEGER_BITS:
            size = _USUAL_GROUPS[self.format] if self.group_size is None else self.group_size
            if size != CHANNEL and (size < _SMALLEST_GROUP or size & (size - 1)):
                raise ConfigurationError(
                    f"--group-size={size}: give {CHANNEL}, one scale for each output, or a power of two from "
                    f"{_SMALLEST_GROUP}"
                )
            return IntegerGrid(_INTEGER_BITS[self.format], size or None, scale_dtype)
        if self.group_size is not None:
            raise ConfigurationError(
                f"--group-size={self.group_size}: groups of {self.format} are of one size; leave it out, or use "
                "int4 or int8"
            )
        grids: dict[str, Grid] = {"fp8": Fp8Grid(scale_dtype), "mxfp4": Mxfp4Grid(), "nvfp4": Nvfp4Grid()}
        return grids[self.format]


def check_divides(spec: ModelSpec, recipe: Recipe, grid: Grid) -> None:
    """Checks that the inputs of all quantised weights are multiples of the group size and of a packed word.

    Raises:
        ConfigurationError: they are not; the message names the weight and the remedy.
    """
    word = _WORD_BITS // _INTEGER_BITS.get(recipe.format, _WORD_BITS)
    for layer in spec.layers:
        for linear in (linear for shared in shared_inputs(layer) for linear in shared.linears):
            if grid.group_size is not None and linear.inputs % grid.group_size:
                raise ConfigurationError(
                    f"{linear.name} has {linear.inputs} inputs, which groups of {grid.group_size} do not divide; "
                    f"{_remedy(recipe, linear.inputs)}"
                )
            if linear.inputs % word:
                raise ConfigurationError(
                    f"{linear.name} has {linear.inputs} inputs, and {word} codes of {recipe.format} make a word; use "
                    "--format=fp8"
                )


def _remedy(recipe: Recipe, inputs: int) -> str:
    largest = inputs & -inputs
    if recipe.format not in _INTEGER_BITS:
        return "use int4, int8 or fp8"
    usable = f"{largest}, or a smaller power of two, or " if largest >= _SMALLEST_GROUP else ""
    return f"give --group-size={usable}{CHANNEL}, one scale for each output"
