"""`tandem quantize`: writes a checkpoint with fewer bits for its weights, in a layout that other systems read too.

Owns the flags (each also a TANDEM_QUANTIZE_* variable) and the progress; `tandem.quantize` does the work.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.compute.choose import choose_kernels
from tandem.core.errors import ConfigurationError
from tandem.models.hub import resolve_model_path, served_name
from tandem.models.output_directory import check_target
from tandem.process.settings import Settings
from tandem.quantize.checkpoint_writer import CheckpointWriter
from tandem.quantize.recipe import FormatName, Method, Recipe
from tandem.quantize.run import QuantizationRun
from tandem.quantize.source import SourceModel
from tandem.quantize.text import TextLimits, read_sequences
from tandem.text.tokenizer import Tokenizer

_USUAL_LENGTH: Final = 512


class QuantizeCommand(
    Settings, cli_prog_name="tandem quantize", env_prefix="TANDEM_QUANTIZE_", cli_shortcuts={"as-json": "json"}
):
    """Write a checkpoint whose weights have fewer bits, in the layout of compressed-tensors, and report what it costs.

    One layer is in memory at a time. A run that was stopped goes on where it was, if the same command is given again.
    """

    model: str = Field(description="model directory, GGUF file, or Hugging Face name; its weights as floats")
    format: FormatName = Field(description="int8, int4, fp8, mxfp4 or nvfp4: of weights; activations stay as they are")
    out: Path = Field(description="directory of the new checkpoint; until it is whole its files are in OUT.partial")
    method: Method = Field(
        "gptq", description="rtn rounds to the nearest; gptq and awq lessen the error on the text of --calibrate"
    )
    group_size: int | None = Field(
        None, description="of int4 and int8: inputs that share a scale, 0 = all; omitted: 64 for int4, all for int8"
    )
    rotate: bool = Field(False, description="merge Hadamard rotations into the weights first, which spreads outliers")
    calibrate: Path | None = Field(
        None,
        description="text in UTF-8, like what is to be served; omitted: the reference of the Python language",
    )
    evaluate: Path | None = Field(
        None, description="text that quality is measured on; omitted: the last eighth of the text of --calibrate"
    )
    sequence_length: int | None = Field(
        None, ge=16, description="tokens of a sequence of either text; omitted: 512, or the model's longest"
    )
    calibration_sequences: int = Field(128, ge=1, description="at most so many are used")
    evaluation_sequences: int = Field(32, ge=1, description="at most so many are used")
    allow_pickle: bool = Field(False, description="read PyTorch files, which can run code, where no others are")
    as_json: bool = Field(False, description="print the report as JSON instead of text")

    def run(self) -> int:
        """Quantise and print the report; returns the exit code."""
        check_target(self.out)
        directory = resolve_model_path(self.model, decoded_to="bfloat16", allow_pickle=self.allow_pickle)
        kernels = choose_kernels(torch.device("cpu"))
        source = SourceModel.open(directory, kernels, allow_pickle=self.allow_pickle)
        length = self._length(source.spec.max_position_embeddings)
        limits = TextLimits(length, self.calibration_sequences, self.evaluation_sequences)
        sequences = read_sequences(Tokenizer.load(directory), self.calibrate, self.evaluate, limits)
        recipe = Recipe(self.format, self.method, self.group_size, self.rotate)
        with _progress(source.spec.num_layers) as on_layer:
            quantization = QuantizationRun(served_name(self.model), source, recipe, sequences, kernels, on_layer)
            report = quantization.write(CheckpointWriter(self.out, quantization.identity()))
        sys.stdout.write(report.as_json() if self.as_json else report.as_text())
        return 0

    def _length(self, longest: int) -> int:
        """Number of tokens of a sequence."""
        if self.sequence_length is None:
            return min(_USUAL_LENGTH, longest)
        if self.sequence_length > longest:
            raise ConfigurationError(
                f"--sequence-length={self.sequence_length}: the model's sequences have at most {longest} tokens; "
                "give that or fewer"
            )
        return self.sequence_length


@contextmanager
def _progress(num_layers: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, otherwise a line for each layer; on standard error."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda num_done: console.print(f"layer {num_done} of {num_layers}")
        return
    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("layers", total=num_layers)
        yield lambda num_done: progress.update(task, completed=num_done)
