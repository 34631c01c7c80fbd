"""Random combinations of a model and features, and what the plainest engine answers to the same requests.

A combination is a family, a dtype, a format of weights and a setting of each feature that must not change answers:
drafts, ranks, the size of blocks and steps, prefix caching, and a pool so small that requests are preempted.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.config import EngineConfig
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tests.helpers import checkpoints
from tests.helpers.engines import drain
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.ranked import ranked_config
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = (
    checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
)
AMPLE_BYTES = 1 << 25
MAX_MODEL_LEN = 256
_SAVED = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}

Answer = tuple[list[int], list[object], object]
Ask = tuple[list[int], SamplingParams]


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny checkpoint. `path` has codes if there is a format, `plain` the numbers they were made from."""

    family: str
    dtype: str
    format: str | None
    path: Path
    plain: Path


def draw_model(rng: random.Random, directory: Path) -> Model:
    """Every family and every published format, alone and together, as far as tiny sizes allow."""
    family, dtype = rng.choice(sorted(FAMILIES)), rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    plain = write_byte_tokenizer(FAMILIES[family](directory / "plain", dtype=dtype, **_SAVED))
    name = rng.choice((None, None, *sorted(FORMATS)))
    if name is None:
        return Model(family, dtype, None, plain, plain)
    try:
        save_published(plain, FORMATS[name], directory / "coded", directory / "decoded")
    except ValueError:  # a matrix too small for a whole group
        return Model(family, dtype, None, plain, plain)
    return Model(family, dtype, name, directory / "coded", plain)


def draw_params(rng: random.Random) -> SamplingParams:
    """Every option that changes tokens or tells of them, alone and mixed."""
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "seed": rng.randrange(100),
        "max_tokens": rng.choice((1, 2, 5, 17, 33)),
    }
    others: dict[str, Any] = {
        "logprobs": rng.choice((0, 2)),
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.7,
        "logit_bias": {rng.randrange(200): 5.0},
    }
    chosen = {name: value for name, value in others.items() if rng.random() < 0.2}
    return SamplingParams(ignore_eos=True, **options, **chosen)


def draw_asks(rng: random.Random, number: int) -> list[Ask]:
    """Prompts of 1 to 200 tokens, of which half begin like another."""

    def prompt(length: int) -> list[int]:
        return [rng.randrange(6, 199) for _ in range(length)]

    beginnings = [prompt(100) for _ in range(2)]
    asks = []
    for index in range(number):
        own = prompt(rng.choice((1, 7, 16, 33, 90, 150, 200)))
        asks.append(((beginnings[index % 2] + own)[:200] if rng.random() < 0.5 else own, draw_params(rng)))
    return asks


def plain_answers(model: Model, asks: list[Ask]) -> list[Answer]:
    """One rank that computes one request after another in large steps, with nothing cached and no drafts.

    Raises:
        ConfigurationError, CheckpointError: the family is not served in this format.
    """
    engine = build_engine(plain_config(model))
    found = []
    for prompt, params in asks:
        request_id = engine.add_request(prompt, params)
        found.append(answer_of(drain(engine)[request_id, 0]))
    engine.close()
    return found


def plain_config(model: Model, **overrides: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 256,
        "prefix_caching": False,
        "kv_cache_bytes": AMPLE_BYTES,
    }
    return ranked_config(model.path, **options | overrides)


def answer_of(outputs: list[RequestOutput]) -> Answer:
    """Tokens, logprobs to the bit, and why it ended. A step with drafts tells several tokens at once."""
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [entry for output in outputs for entry in output.logprobs or ()], outputs[-1].finish_reason
