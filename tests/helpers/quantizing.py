"""Quantises tiny checkpoints: a text, an open source, a whole run."""

from pathlib import Path

import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.quantize.checkpoint_writer import CheckpointWriter
from tandem.quantize.recipe import Recipe
from tandem.quantize.report import QuantizationReport
from tandem.quantize.run import QuantizationRun
from tandem.quantize.source import SourceModel
from tandem.quantize.text import Sequences

LENGTH = 24


def random_tokens(num_sequences: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """[sequences, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_sequences, LENGTH), generator=generator)


def random_sequences(vocab_size: int) -> Sequences:
    """More tokens than a tiny model has inputs."""
    return Sequences(random_tokens(12, vocab_size), random_tokens(3, vocab_size, seed=1))


def quantize_tiny(path: Path, out: Path, recipe: Recipe) -> QuantizationReport:
    """The checkpoint in `path`, quantised into `out` on random tokens."""
    source = SourceModel.open(path, TorchKernels())
    sequences = random_sequences(source.spec.vocab_size)
    run = QuantizationRun("tiny", source, recipe, sequences, TorchKernels(), lambda num_done: None)
    return run.write(CheckpointWriter(out, run.identity()))
