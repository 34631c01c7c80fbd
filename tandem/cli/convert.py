"""`tandem convert`: a checkpoint in another file format, with the same bits.

Owns the flags (each also a TANDEM_CONVERT_* variable) and the progress; `tandem.models.convert` does the work.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tandem.models.checkpoint import open_checkpoint
from tandem.models.convert import convert
from tandem.models.hub import resolve_model_path
from tandem.models.output_directory import check_target
from tandem.process.settings import Settings


class ConvertCommand(
    Settings, cli_prog_name="tandem convert", env_prefix="TANDEM_CONVERT_", cli_shortcuts={"as-json": "json"}
):
    """Write a checkpoint's weights as safetensors with the same bits; with --lossless in two thirds of the bytes.

    A few MiB are in memory at a time. A run that was stopped goes on behind the files that it wrote, if the same
    command is given again.
    """

    model: str = Field(description="model directory, GGUF file, or Hugging Face name")
    out: Path = Field(description="directory of the new checkpoint; until it is whole its files are in OUT.partial")
    lossless: bool = Field(
        False, description="entropy-code the exponents of bfloat16 weights; only Tandem reads such a checkpoint"
    )
    allow_pickle: bool = Field(False, description="read PyTorch files, which can run code, where no others are")
    as_json: bool = Field(False, description="print what was written as JSON instead of text")

    def run(self) -> int:
        """Convert and say what was written; returns the exit code."""
        check_target(self.out)
        directory = resolve_model_path(self.model, allow_pickle=self.allow_pickle)
        checkpoint = open_checkpoint(directory, allow_pickle=self.allow_pickle)
        total = sum(checkpoint.outline(name).nbytes for name in checkpoint.names)
        with _progress(total) as on_bytes:
            done = convert(checkpoint, self.out, lossless=self.lossless, on_bytes=on_bytes)
        if self.as_json:
            sys.stdout.write(json.dumps(asdict(done) | {"out": str(self.out)}) + "\n")
        else:
            sys.stdout.write(
                f"{self.out}: {done.bytes_after / 1e6:.1f} MB of weights, {done.bytes_after / done.bytes_before:.1%} "
                f"of {done.bytes_before / 1e6:.1f} MB; {done.num_coded} of {done.num_tensors} tensors are coded\n"
            )
        return 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere; on standard error."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("weights", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
