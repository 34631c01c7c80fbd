"""Quality of coded weights: perplexity and divergence from bfloat16 weights, for Tandem and for each peer's own codes.

SmolLM2-135M-Instruct on one fixed text of the repository, each position given the text before it. The reference is the
checkpoint in bfloat16, computed in float32, from which every system codes by its own tool as in the race. Nothing is
timed, so other load does not matter.
"""

import argparse
import hashlib
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.dtypes import DOCUMENTS, NUM_TOKENS, distance, tandem_logits, text_of
from bench.load import prioritise
from bench.race.coded import ACTIVATIONS, entrants
from bench.race.ours import Tandem, weight_bytes
from bench.race.peers.llama_cpp import LlamaCpp
from bench.race.peers.openvino import OpenVino
from bench.race.peers.process import ROOT, surroundings
from bench.race.shapes import REAL, checkpoint
from bench.report import Report, Row
from tandem.compute.weights.formats import read_formats
from tandem.compute.weights.row_rounding import rounding_rows
from tandem.models.hub import resolve_model_path
from tandem.text.tokenizer import Tokenizer

_SCRIPTS = "bench.race.peers.scripts"
_MB = 1e6
Logits = Callable[[list[int]], torch.Tensor]


def measure(directory: Path, only: tuple[str, ...] = (), num_tokens: int = NUM_TOKENS) -> Report:
    """`only`: systems, by name; none: all."""
    source, text = checkpoint(REAL), text_of(DOCUMENTS)
    token_ids = Tokenizer.load(source).encode(text, add_special_tokens=False)[:num_tokens]
    context, next_ids = token_ids[:-1], token_ids[1:]
    reference = tandem_logits(source, context, "float32", native=True)
    rows = [*_rows("bfloat16 weights", reference, reference, next_ids, weight_bytes(source))]
    for name, num_bytes, logits in _systems(directory, source, only):
        rows += _rows(name, reference, logits(context), next_ids, num_bytes)
        print(f"{name}:", "; ".join(f"{row.metric} {row.value:.5g}" for row in rows[-4:]), flush=True)
    config = {
        "model": "SmolLM2-135M-Instruct, bfloat16",
        "documents": DOCUMENTS,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(token_ids),
    }
    return Report("race-quality", config, rows)


def _systems(directory: Path, source: Path, only: tuple[str, ...]) -> Iterator[tuple[str, int, Logits]]:
    """Each with the bytes of its weights and what computes its logits. Ours compute in bfloat16, as in the race."""
    for system in entrants(directory, "float32"):
        if only and system.name not in only:
            continue
        system.prepare()
        if isinstance(system, Tandem):
            assert system.weights is not None
            model = system.weights(source)
            formats_of = rounding_rows(read_formats) if system.flags[-2:] == ACTIVATIONS else read_formats
            path = resolve_model_path(str(model))
            logits = partial(tandem_logits, path, dtype="bfloat16", native=True, formats_of=formats_of)
            yield system.name, weight_bytes(model), logits
        elif isinstance(system, LlamaCpp):
            file = system.coded(source)
            command = [str(system.environment.python), "-m", f"{_SCRIPTS}.llama_logits", str(file)]
            yield system.name, weight_bytes(file), partial(_said_by, command)
        elif isinstance(system, OpenVino):
            model = system.exported(source)
            command = [str(system.environment.python), "-m", f"{_SCRIPTS}.openvino_logits", str(model), "f32"]
            yield system.name, weight_bytes(model), partial(_said_by, command)


def _said_by(command: list[str], token_ids: list[int]) -> torch.Tensor:
    """Logits that a peer's script writes."""
    with tempfile.TemporaryDirectory() as place:
        tokens, out = Path(place) / "tokens.json", Path(place) / "logits.npy"
        tokens.write_text(json.dumps(token_ids))
        subprocess.run([*command, str(tokens), str(out)], check=True, cwd=ROOT, env=surroundings({}))
        return torch.from_numpy(np.load(out))


def _rows(
    system: str, reference: torch.Tensor, logits: torch.Tensor, next_ids: list[int], num_bytes: int
) -> Iterator[Row]:
    found = distance(reference, logits, next_ids)
    loss = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(next_ids)).item()
    yield Row("text", system, "perplexity", math.exp(loss), "")
    yield Row("text", system, "mean KL divergence from bfloat16 weights", found.mean_divergence, "nats")
    yield Row("text", system, "share of equal first choices", 1 - found.differs.double().mean().item(), "")
    yield Row("text", system, "weights on disk", num_bytes / _MB, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("build/race"))
    parser.add_argument("--only", nargs="*", default=[], help="these systems, by name")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of the text, from its beginning")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure(arguments.directory, tuple(arguments.only), arguments.tokens)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
