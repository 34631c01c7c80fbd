"""Rounding by dtype: log-probabilities of SmolLM2-135M-Instruct beside those of `transformers` in float32, on one text.

The text is the repository's, its SHA-256 is kept with the result. Every position is scored given the text before it.
Weights come from one GGUF file; those in 16 bits are rounded from it once, so one row computes in float32 with weights
rounded to bfloat16: what is above it is the arithmetic's. Nothing is timed, so other load does not matter.
"""

import argparse
import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers

from bench.load import prioritise
from bench.report import Report, Row
from tandem.compute.backends import choose_backends
from tandem.compute.choose import choose_kernels
from tandem.compute.native.build import default_cache_dir
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import TokenLogprobs
from tandem.kvcache.spec import build_layout
from tandem.models.default_model import fetch_default_model
from tandem.models.gguf.convert import converted
from tandem.models.loader import load_model
from tandem.text.tokenizer import Tokenizer
from tests.helpers.engines import drain, tiny_engine
from tests.helpers.handoff import Side, hand_off
from tests.helpers.stepping import Stepper

DOCUMENTS = ("docs/examples/water-cycle.txt", "docs/decisions/0040-tests-that-fail-by-chance.md")
NUM_TOKENS = 2500
DTYPES = ("float32", "bfloat16", "float16")
NUM_SERVED = 512  # of these, as a prompt in several ways
NUM_ANSWERED = 32
_ROWS = 256  # of logits at a time in float64
_ROOT = Path(__file__).parents[1]
_CPU = torch.device("cpu")

Scored = tuple[int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Distance:
    """Of some logits from the reference's, by position; natural logarithms, computed in float64."""

    logprob_errors: torch.Tensor  # [num_tokens] |Δ logprob| of the text's next token
    divergences: torch.Tensor  # [num_tokens] KL(reference || other)
    margins: torch.Tensor  # [num_tokens] the reference's logprob of its first choice less that of its second
    differs: torch.Tensor  # [num_tokens] bool, whether the first choice is another

    @property
    def mean_divergence(self) -> float:
        return self.divergences.mean().item()

    @property
    def mean_error(self) -> float:
        return self.logprob_errors.mean().item()


def text_of(documents: Sequence[str]) -> str:
    """Texts of the repository, one after the other."""
    return "\n".join((_ROOT / name).read_text(encoding="utf-8") for name in documents)


def checkpoint(dtype: str | None) -> Path:
    """The model's directory with weights of `dtype`, or of its codes, made first if need be. Raises CheckpointError."""
    return converted(
        fetch_default_model(default_cache_dir() / "models"), default_cache_dir() / "gguf", decoded_to=dtype
    )


def tandem_logits(
    directory: Path, token_ids: list[int], dtype: str, *, native: bool, formats_of: FormatReader = read_formats
) -> torch.Tensor:
    """[num_tokens, vocab] float32, from one pass of our decoder as an engine of that dtype loads it.

    Raises:
        ConfigurationError: `native`, and the compiled kernels cannot be had.
    """
    packed_dir = default_cache_dir() / "weights" if native else None
    kernels = choose_kernels(_CPU, native)
    model = load_model(
        str(directory), dtype=dtype, device=_CPU, kernels=kernels, packed_dir=packed_dir, formats_of=formats_of
    )
    backends = choose_backends("native" if native else "reference", _CPU, build_layout(model.spec.kv_specs, 16), 0.0)
    with torch.inference_mode():
        return Stepper(model.decoder, backends, len(token_ids), block_size=16).step(token_ids)


def transformers_logits(directory: Path, token_ids: list[int], dtype: str) -> torch.Tensor:
    """The same of `transformers`, with its own choice of attention and without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()


def distance(reference: torch.Tensor, other: torch.Tensor, next_ids: list[int]) -> Distance:
    """Args:
    reference, other: [num_tokens, vocab] logits.
    next_ids: the token that the text has after each.
    """
    parts = [
        _distance(reference[rows], other[rows], torch.tensor(next_ids[rows]))
        for rows in (slice(start, start + _ROWS) for start in range(0, len(next_ids), _ROWS))
    ]
    return Distance(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _distance(reference: torch.Tensor, other: torch.Tensor, next_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    expected, found = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    errors = (expected - found).gather(1, next_ids[:, None])[:, 0].abs()
    divergences = (expected.exp() * (expected - found)).sum(-1)
    best = expected.topk(2).values
    return errors, divergences, best[:, 0] - best[:, 1], expected.argmax(-1) != found.argmax(-1)


def rows_of(system: str, found: Distance) -> Iterator[Row]:
    """Rows of one system: errors of its log-probabilities, divergence, and positions with another first choice."""
    where = found.margins[found.differs]
    yield _row(system, "mean |Δ logprob|", found.mean_error, "nat")
    yield _row(system, "p99 |Δ logprob|", found.logprob_errors.quantile(0.99).item(), "nat")
    yield _row(system, "mean KL", found.mean_divergence, "nat")
    yield _row(system, "positions with another first choice", float(len(where)), "positions")
    if len(where):
        yield _row(system, "margin in float32 there, median", where.median().item(), "nat")
        yield _row(system, "margin in float32 there, largest", where.max().item(), "nat")


def _row(system: str, metric: str, value: float, unit: str) -> Row:
    return Row("text", system, metric, value, unit)


def ways_to_serve(directory: Path, token_ids: list[int], dtype: str) -> dict[str, tuple[list[Scored], list[Scored]]]:
    """Scores of a prompt, or of the answer to it, in several ways with the compiled kernels: by way, as found and as
    expected of the prompt whole, cold and alone.

    Of an answer, tokens and logprobs with 20 alternatives, of a prompt its logprobs. They are to be equal bit for bit.
    """
    room = len(token_ids) + NUM_ANSWERED
    options = {
        "dtype": dtype,
        "native_kernels": True,
        "attention_backend": "native",
        "max_model_len": room,
        "max_num_batched_tokens": room,
        "kv_cache_bytes": 8 * room * 65536,
    }
    greedy = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True, logprobs=20)
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    others = [token_ids[start:] for start in (len(token_ids) // 3, len(token_ids) // 2)]

    def serve(params: SamplingParams, prompts: Sequence[list[int]], **changed: object) -> list[Scored]:
        engine = tiny_engine(directory, **options | changed)
        try:
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            return _scores(drain(engine)[ids[0], 0])
        finally:
            engine.close()

    answer, prompt = serve(greedy, [token_ids]), serve(scoring, [token_ids])
    small = {"max_num_batched_tokens": 37}
    return {
        "prompt in chunks of 37": (serve(scoring, [token_ids], **small), prompt),
        "prompt beside others": (serve(scoring, [token_ids, *others]), prompt),
        "answer after chunks of 37": (serve(greedy, [token_ids], **small), answer),
        "answer beside others": (serve(greedy, [token_ids, *others]), answer),
        "answer from the prefix cache": (_served_twice(directory, token_ids, greedy, options), answer),
        # NOTE: the first token is the prefill worker's, and comes to this helper without its logprobs
        "answer after a hand-off": (_handed_off(directory, token_ids, greedy, options)[1:], answer[1:]),
    }


def _served_twice(
    directory: Path, token_ids: list[int], params: SamplingParams, options: dict[str, object]
) -> list[Scored]:
    """The second answer."""
    engine = tiny_engine(directory, **options)
    try:
        for _ in range(2):
            cached_before = engine.counters.num_cached_prompt_tokens
            request_id = engine.add_request(token_ids, params)
            scores = _scores(drain(engine)[request_id, 0])
        assert engine.counters.num_cached_prompt_tokens > cached_before, "nothing was found in the prefix cache"
        return scores
    finally:
        engine.close()


def _handed_off(
    directory: Path, token_ids: list[int], params: SamplingParams, options: dict[str, object]
) -> list[Scored]:
    """The prompt computed by one engine, the answer by another."""
    source, destination = Side(directory, **options), Side(directory, **options)
    try:
        hand_off(source, destination, token_ids, params)
        return _scores([output for output in destination.outputs if output.request_id == "decode"])
    finally:
        source.engine.close()
        destination.engine.close()


def _scores(outputs: Sequence[RequestOutput]) -> list[Scored]:
    """Of the prompt where they were asked for, else of the answer."""
    prompts = [scores for output in outputs if (scores := output.prompt_logprobs) is not None]
    if prompts:
        return [(0 if score is None else score.token_id, score) for score in prompts[0]]
    found: list[Scored] = []
    for output in outputs:
        scores = output.logprobs or (None,) * len(output.token_ids)
        found += zip(output.token_ids, scores, strict=True)
    return found


def measure() -> Report:
    text, directories = text_of(DOCUMENTS), {dtype: checkpoint(dtype) for dtype in DTYPES}
    token_ids = Tokenizer.load(directories["float32"]).encode(text, add_special_tokens=False)[:NUM_TOKENS]
    context, next_ids = token_ids[:-1], token_ids[1:]
    systems: dict[str, Callable[[], torch.Tensor]] = {
        "transformers, float32 with bfloat16 weights": partial(
            transformers_logits, directories["bfloat16"], context, "float32"
        )
    }
    for dtype, directory in directories.items():
        for kernels, native in (("compiled", True), ("PyTorch", False)):
            name = f"Tandem, {kernels} kernels, {dtype}"
            systems[name] = partial(tandem_logits, directory, context, dtype, native=native)
        if dtype != "float32":
            systems[f"transformers, {dtype}"] = partial(transformers_logits, directory, context, dtype)
    reference = transformers_logits(directories["float32"], context, "float32")
    rows: list[Row] = []
    for system, logits in systems.items():
        found = distance(reference, logits(), next_ids)
        rows += rows_of(system, found)
        print(f"{system}: mean |Δ logprob| {found.mean_error:.4g}, mean KL {found.mean_divergence:.4g}", flush=True)
        gc.collect()
    loss = torch.nn.functional.cross_entropy(reference, torch.tensor(next_ids))
    del reference
    for dtype, directory in directories.items():
        for way, (got, expected) in ways_to_serve(directory, token_ids[:NUM_SERVED], dtype).items():
            different = sum(score != other for score, other in zip(got, expected, strict=True))
            rows.append(Row(way, f"Tandem, compiled kernels, {dtype}", "other scores", different, "positions"))
        print(f"served in several ways: {dtype}", flush=True)
    config = {
        "model": "SmolLM2-135M-Instruct, Q4_1",
        "documents": DOCUMENTS,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(token_ids),
        "tokens_served": NUM_SERVED,
        "reference": "transformers, float32",
        "mean_logprob": -loss.item(),
        "transformers": transformers.__version__,
    }
    return Report("dtypes", config, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    report = measure()
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
