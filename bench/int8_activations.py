"""Loss by activations in 8 bits: SmolLM2-135M-Instruct's codes (Q4_1, embedding and head Q8_0) on one text.

The reference is the same codes with all arithmetic in float32. Every position is scored given the text before it, by
one pass of the decoder with the compiled kernels. Nothing is timed, so other load does not matter.
"""

import argparse
import hashlib
from pathlib import Path

import torch

from bench.dtypes import DOCUMENTS, checkpoint, distance, rows_of, text_of
from bench.load import prioritise
from bench.report import Report, Row
from tandem.compute.backends import choose_backends
from tandem.compute.choose import choose_kernels
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.compute.weights.row_rounding import rounding_rows
from tandem.kvcache.spec import build_layout
from tandem.models.loader import load_model
from tandem.text.tokenizer import Tokenizer
from tests.helpers.stepping import Stepper

SYSTEMS: dict[str, tuple[str, FormatReader]] = {
    "bfloat16": ("bfloat16", read_formats),
    "bfloat16, int8 activations": ("bfloat16", rounding_rows(read_formats)),
    "float32, int8 activations": ("float32", rounding_rows(read_formats)),
}
_CPU = torch.device("cpu")


def measure(num_tokens: int) -> Report:
    text, directory = text_of(DOCUMENTS), checkpoint(None)
    token_ids = Tokenizer.load(directory).encode(text, add_special_tokens=False)[:num_tokens]
    context, next_ids = token_ids[:-1], token_ids[1:]
    reference = _logits(directory, context, "float32", read_formats)
    rows = [Row("text", "float32", "perplexity", _perplexity(reference, next_ids), "")]
    for system, (dtype, formats_of) in SYSTEMS.items():
        logits = _logits(directory, context, dtype, formats_of)
        rows.append(Row("text", system, "perplexity", _perplexity(logits, next_ids), ""))
        rows += rows_of(system, distance(reference, logits, next_ids))
    config = {
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "documents": DOCUMENTS,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(token_ids),
        "reference": "the same codes in float32",
    }
    return Report("int8-activations", config, rows)


def _logits(directory: Path, token_ids: list[int], dtype: str, formats_of: FormatReader) -> torch.Tensor:
    """[num_tokens, vocab] float32."""
    model = load_model(
        str(directory), dtype=dtype, device=_CPU, kernels=choose_kernels(_CPU, True), formats_of=formats_of
    )
    backends = choose_backends("native", _CPU, build_layout(model.spec.kv_specs, 16), 0.0)
    with torch.inference_mode():
        return Stepper(model.decoder, backends, len(token_ids), block_size=16).step(token_ids)


def _perplexity(logits: torch.Tensor, next_ids: list[int]) -> float:
    return torch.nn.functional.cross_entropy(logits, torch.tensor(next_ids)).exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2500)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure(arguments.tokens)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
