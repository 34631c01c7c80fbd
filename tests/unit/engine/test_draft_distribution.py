"""Sampled tokens with every drafter: for each seed those without drafts, and distributed as the model says exactly."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.artificial import RandomDrafter
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.engine.engine import Engine
from tandem.scheduler.output import NewRequest
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, save_tiny_llama
from tests.helpers.draft_models import tiny_drafter
from tests.helpers.engines import drafting_engine
from tests.helpers.head_drafters import head_drafter
from tests.helpers.heads import save_eagle3, save_with_mtp
from tests.helpers.tokenizers import write_byte_tokenizer

VOCAB_SIZE = 199
WORDS = (21, 22, 23)  # the only tokens allowed, so that each answer is drawn often
PROMPT = [21, 22, 23, 21, 23, 22, 22, 21, 21, 23]
NUM_TOKENS = 3  # the first comes with the prompt, the others in steps with drafts
BATCH = 128
DRAFTERS = ("ngram", "suffix", "draft", "eagle", "mtp", "knowing", "lying", "blind")
QUICK = ("suffix", "eagle", "lying")
Answers = Sequence[tuple[int, ...]]


@dataclass
class Knowing:
    """A `Drafter` that was told the answers by request, and names them or, `shift` words on, others."""

    answers: Answers
    shift: int = 0

    def __post_init__(self) -> None:
        self._num_told: dict[str, int] = {}

    def begin(self, request: NewRequest) -> None:
        self._num_told[request.request_id] = len(request.output_token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._num_told[request_id] += len(token_ids)

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        found = {}
        for request_id, limit in limits.items():
            told = self._num_told[request_id]
            following = self.answers[int(request_id)][told : told + limit]
            found[request_id] = [WORDS[(WORDS.index(word) + self.shift) % len(WORDS)] for word in following]
        return found

    def end(self, request_id: str) -> None:
        del self._num_told[request_id]


@dataclass(frozen=True)
class Models:
    """Checkpoints of the tests."""

    llama: Path
    small: Path
    eagle: Path
    mtp: Path

    def served(self, name: str) -> Path:
        return self.mtp if name == "mtp" else self.llama

    def drafter(self, name: str, plain: Answers) -> Drafter:
        size = {"num_blocks": 4 * BATCH, "max_chunk_tokens": 2048, "max_num_running": BATCH}
        made: dict[str, Callable[[], Drafter]] = {
            "ngram": NgramDrafter,
            "suffix": SuffixDrafter,
            "draft": lambda: tiny_drafter(self.small, VOCAB_SIZE, **size),
            "eagle": lambda: head_drafter(self.llama, f"eagle={self.eagle}", **size),
            "mtp": lambda: head_drafter(self.mtp, "mtp", **size),
            "knowing": lambda: Knowing(plain),
            "lying": lambda: Knowing(plain, shift=1),
            "blind": lambda: RandomDrafter(VOCAB_SIZE),
        }
        return made[name]()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("models")
    llama = write_byte_tokenizer(save_tiny_llama(directory / "llama", num_hidden_layers=3))
    mtp = write_byte_tokenizer(save_with_mtp((BUILDERS | EXPERT_BUILDERS)["deepseek_v3"], directory / "mtp"))
    small = write_byte_tokenizer(save_tiny_llama(directory / "small", num_hidden_layers=1, seed=5))
    return Models(llama, small, save_eagle3(directory / "eagle", llama), mtp)


def drawn(engine: Engine, num_draws: int) -> Answers:
    """Answers by seed."""
    found: list[list[int]] = [[] for _ in range(num_draws)]
    for first in range(0, num_draws, BATCH):
        for seed in range(first, min(first + BATCH, num_draws)):
            params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, allowed_token_ids=WORDS)
            engine.add_request(PROMPT, params, request_id=str(seed))
        while engine.has_work:
            for output in engine.step():
                found[int(output.request_id)] += output.token_ids
    engine.check()
    return [tuple(answer) for answer in found]


def probabilities(path: Path) -> Mapping[tuple[int, ...], float]:
    """Of each answer, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = list(product(WORDS, repeat=NUM_TOKENS))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *answer] for answer in answers]), use_cache=False).logits
    shares = logits[:, len(PROMPT) - 1 : -1, list(WORDS)].double().softmax(-1)
    return {
        answer: math.prod(float(row[WORDS.index(word)]) for row, word in zip(rows, answer, strict=True))
        for answer, rows in zip(answers, shares, strict=True)
    }


@pytest.fixture(scope="module", params=[250, pytest.param(100_000, marks=pytest.mark.slow)])
def num_draws(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def plain(models: Models, num_draws: int) -> Callable[[Path], Answers]:
    """Answers without drafts, and what they are of: drawn once of each model."""
    known: dict[Path, Answers] = {}

    def found(path: Path) -> Answers:
        if path not in known:
            known[path] = drawn(engine_of(path, None), num_draws)
            expected = probabilities(path)
            counts = Counter(known[path])
            assert set(counts) <= set(expected)
            statistic = sum((counts[one] - num_draws * p) ** 2 / (num_draws * p) for one, p in expected.items())
            freedom = len(expected) - 1
            assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # some four standard deviations
        return known[path]

    return found


def engine_of(path: Path, drafter: Drafter | None) -> Engine:
    speculation = None if drafter is None else Speculation(drafter, NUM_TOKENS, adapts=False)
    return drafting_engine(
        path, speculation, max_num_running=BATCH, max_num_batched_tokens=2048, kv_cache_bytes=1 << 23, block_size=8
    )


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]
)
def test_tokens_of_every_seed_are_those_without_drafts_and_as_likely_as_they_should_be(
    models: Models, plain: Callable[[Path], Answers], num_draws: int, name: str
) -> None:
    path = models.served(name)
    expected = plain(path)
    engine = engine_of(path, models.drafter(name, expected))
    assert drawn(engine, num_draws) == expected
    drafted, accepted = engine.counters.num_drafted, engine.counters.num_accepted
    assert drafted > num_draws / 4
    if name == "knowing":
        assert accepted == drafted
    elif name == "lying":
        assert accepted == 0
    else:
        assert accepted < drafted
