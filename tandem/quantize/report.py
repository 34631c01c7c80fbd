"""Report of a quantisation: sizes, quality on a held-out text, and the error of each layer, as JSON and as text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tandem.quantize.coded_layer import WeightError
from tandem.quantize.evaluation import Quality
from tandem.quantize.recipe import Recipe

_BAR_COLUMNS: Final = 40
_NUM_WORST: Final = 5
_NUM_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class LayerError:
    """Error of one layer. `of_stream`: relative error of its output with this and all earlier layers quantised."""

    layer: int
    of_stream: float
    weights: tuple[WeightError, ...]


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """Results of a quantisation. `bytes_before`, `bytes_after`: sizes of the weight files. `group_size`: inputs that
    share a scale; None = all of an output.
    """

    model: str
    recipe: Recipe
    group_size: int | None
    num_calibration_tokens: int
    bytes_before: int
    bytes_after: int
    quality: Quality
    layers: tuple[LayerError, ...]

    def as_json(self) -> str:
        """All results as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def as_text(self) -> str:
        """One page of text, with the layers' errors as bars."""
        errors = [*_bars(self.layers), "", *_worst(self.layers), *_fallbacks(self.layers)]
        return "\n".join([*self._summary(), "", *errors]) + "\n"

    def _summary(self) -> list[str]:
        recipe, quality = self.recipe, self.quality
        groups = "one scale for each output" if self.group_size is None else f"groups of {self.group_size}"
        rotated = ", rotated" if recipe.rotate else ""
        ratio = quality.perplexity_after / quality.perplexity_before
        return [
            f"{self.model}: {recipe.format} by {recipe.method}, {groups}{rotated}",
            f"bytes             {self.bytes_before:,} -> {self.bytes_after:,} "
            f"({self.bytes_after / self.bytes_before:.0%})",
            f"perplexity        {quality.perplexity_before:.4f} -> {quality.perplexity_after:.4f} (x {ratio:.4f})",
            f"top-1 agreement   {quality.top1_agreement:.2%}",
            f"KL divergence     {quality.kl_divergence:.5f} nats a token",
            f"tokens            {self.num_calibration_tokens:,} of calibration, {quality.num_tokens:,} predicted",
        ]


def _bars(layers: Sequence[LayerError]) -> list[str]:
    longest = max((layer.of_stream for layer in layers), default=0.0) or 1.0
    lines = ["Relative error of the residual stream behind each layer:"]
    for layer in layers:
        bar = "█" * round(layer.of_stream / longest * _BAR_COLUMNS)
        lines.append(f"{layer.layer:>5} {layer.of_stream:>9.5f} {bar}".rstrip())
    return lines


def _worst(layers: Sequence[LayerError]) -> list[str]:
    """Weights with the largest errors of their outputs, or of their numbers if no inputs were seen."""
    errors = [error for layer in layers for error in layer.weights]
    errors.sort(key=_size, reverse=True)
    lines = ["Weights with the largest relative errors of their outputs (of their numbers):"]
    for error in errors[:_NUM_WORST]:
        outputs = "-" if error.of_outputs is None else f"{error.of_outputs:.5f}"
        lines.append(f"{outputs:>9} ({error.of_numbers:.5f})  {error.name}")
    return lines


def _fallbacks(layers: Sequence[LayerError]) -> list[str]:
    """Weights that were rounded to the nearest because calibration has seen too few of their inputs."""
    errors = [error for layer in layers for error in layer.weights if error.is_fallback]
    if not errors:
        return []
    lines = ["", f"{len(errors)} weights saw too few tokens of calibration and were rounded to the nearest (tokens):"]
    lines += [f"{error.num_rows:>9}  {error.name}" for error in errors[:_NUM_NAMED]]
    left = len(errors) - _NUM_NAMED
    return [*lines, f"{left:>9}  more, in the JSON report"] if left > 0 else lines


def _size(error: WeightError) -> float:
    return error.of_numbers if error.of_outputs is None else error.of_outputs
