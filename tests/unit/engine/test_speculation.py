"""Answers with drafts are those without, token for token, whatever is drafted and whatever happens to a request."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.artificial import RandomDrafter, ReplayDrafter
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.engine.engine import Engine
from tandem.engine.logits import SamplingState
from tandem.engine.sampler import Sampler
from tandem.engine.verification import choose_tokens
from tandem.text.grammar import regex_grammar
from tests.helpers import checkpoints
from tests.helpers.engines import (
    drafting_engine,
    drain,
    least_kv_cache_bytes,
    serve_alone,
    text,
    tiny_engine,
    token_ids,
)
from tests.helpers.handoff import Side, hand_off
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import write_byte_tokenizer

VOCAB_SIZE = 199
FAMILIES = ("llama", "gemma3", "gemma4", "deepseek_v3", "qwen3_moe", "nsa")
BUILDERS = checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS | BLOCK_BUILDERS
PARAMS = {
    "greedy": SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(max_tokens=30, seed=3, ignore_eos=True, logprobs=1),
    "filtered": SamplingParams(max_tokens=30, seed=4, top_p=0.9, top_k=40, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    "biased": SamplingParams(
        max_tokens=30, seed=5, logit_bias={7: 4.0}, bad_words=((7, 7), (9,)), min_tokens=20, frequency_penalty=0.2
    ),
    "grammar": SamplingParams(max_tokens=30, seed=6, grammar=regex_grammar("([a-c]{2}-[0-9]{2} ){3,}")),
}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(6, VOCAB_SIZE) for _ in range(num_tokens)]


PROMPTS = {name: prompt_of(index, 5 + 17 * index) for index, name in enumerate(PARAMS)}


def checkpoint_of(family: str, directory: Path) -> Path:
    return write_byte_tokenizer(BUILDERS[family](directory))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path) -> dict[str, list[int]]:
    return serve_alone(llama, PROMPTS, PARAMS)


def drafters(plain: Mapping[str, Sequence[int]]) -> dict[str, Callable[[], Drafter]]:
    answers = {tuple(PROMPTS[name]): tokens for name, tokens in plain.items()}
    return {
        "knowing": lambda: ReplayDrafter(answers, VOCAB_SIZE),
        "half": lambda: ReplayDrafter(answers, VOCAB_SIZE, 0.6),
        "lying": lambda: ReplayDrafter(answers, VOCAB_SIZE, 0.0),
        "blind": lambda: RandomDrafter(VOCAB_SIZE),
        "ngram": lambda: NgramDrafter(1),
        "suffix": SuffixDrafter,
    }


def checking_all(drafter: Drafter) -> Speculation:
    return Speculation(drafter, adapts=False)


def served(engine: Engine) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, PARAMS[name], request_id=name)
    outputs = drain(engine)
    return {name: token_ids(outputs[name, 0]) for name in PROMPTS}


@pytest.mark.parametrize("name", ["knowing", "half", "lying", "blind", "ngram", "suffix"])
def test_every_drafter_leaves_the_tokens_as_they_are(llama: Path, plain: dict[str, list[int]], name: str) -> None:
    engine = drafting_engine(llama, checking_all(drafters(plain)[name]()))
    assert served(engine) == plain
    accepted, drafted = engine.counters.num_accepted, engine.counters.num_drafted
    drafts = engine.counters.drafts
    assert list(drafts.accepted_at) == sorted(drafts.accepted_at, reverse=True)
    # NOTE: first tokens come with the prompt; the last step of "grammar" only finds that the answer is complete
    assert drafts.num_steps + accepted == sum(map(len, plain.values())) - len(plain) + 1
    if name == "knowing":
        assert accepted == drafted > 100
    elif name == "lying":
        assert (accepted, drafted > 100) == (0, True)
    elif name == "half":
        assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *(pytest.param(f, marks=pytest.mark.slow) for f in sorted({*BUILDERS} - {*FAMILIES})),
    ],
)
def test_every_family_is_exact(family: str, tmp_path: Path) -> None:
    path = checkpoint_of(family, tmp_path)
    plain = serve_alone(path, PROMPTS, PARAMS)
    engine = drafting_engine(path, checking_all(drafters(plain)["half"]()))
    assert served(engine) == plain
    assert 0 < engine.counters.num_accepted < engine.counters.num_drafted


def test_logits_are_those_without_drafts_bit_for_bit(llama: Path) -> None:
    """Told by logprobs. The compiled kernels compute each row as they would alone."""
    load_or_skip()
    options = {"native_kernels": True, "attention_backend": "auto", "dtype": "bfloat16"}
    prompt = PROMPTS["greedy"]
    answer = serve_alone(llama, {"r": prompt}, {"r": PARAMS["greedy"]}, **options)["r"]
    found = []
    for speculation in (None, checking_all(ReplayDrafter({tuple(prompt): answer}, VOCAB_SIZE, 0.6))):
        engine = drafting_engine(llama, speculation, **options)
        request_id = engine.add_request(PROMPTS["greedy"], PARAMS["greedy"])
        found.append([output.logprobs for output in drain(engine)[request_id, 0]])
    assert engine.counters.num_accepted > 0
    assert found[0] == found[1]


def test_chunks_hits_preemption_and_aborts_change_nothing(llama: Path, plain: dict[str, list[int]]) -> None:
    num_bytes = least_kv_cache_bytes(llama, 128, 48, "float32")
    engine = drafting_engine(
        llama,
        checking_all(drafters(plain)["half"]()),
        max_num_batched_tokens=48,
        max_num_running=8,
        max_model_len=128,
        kv_cache_bytes=2 * num_bytes,
        block_size=8,
    )
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for round_ in range(2):
        for name, prompt in PROMPTS.items():
            engine.add_request(prompt, PARAMS[name], request_id=f"{name} {round_}")
        aborted = engine.add_request(prompt_of(99, 30), PARAMS["greedy"])
        for _ in range(9):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.abort(aborted)
        for (request_id, _), outputs in drain(engine).items():
            tokens.setdefault(request_id, []).extend(token_ids(outputs))
        assert {name: tokens[f"{name} {round_}"] for name in PROMPTS} == plain
    assert engine.counters.num_preemptions > 0
    assert engine.counters.num_cached_prompt_tokens > 0
    assert engine.counters.num_accepted > 0


def test_every_choice_of_a_request_is_exact(llama: Path) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=3, ignore_eos=True)
    found = []
    for speculation in (None, checking_all(NgramDrafter(1))):
        engine = drafting_engine(llama, speculation)
        request_id = engine.add_request(PROMPTS["greedy"] * 3, params)
        outputs = drain(engine)
        found.append([token_ids(outputs[request_id, index]) for index in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_what_another_worker_began_is_exact(llama: Path, plain: dict[str, list[int]], name: str) -> None:
    """The decode worker drafts from the first step, with the prompt that it never computed."""
    options = {"max_num_batched_tokens": 32, "max_num_running": 16, "block_size": 8, "kv_cache_bytes": 2 << 20}
    prompt = PROMPTS["filtered"][:20] * 3
    expected = serve_alone(llama, {"r": prompt}, {"r": PARAMS[name]})["r"]
    speculation = checking_all(ReplayDrafter({tuple(prompt): expected}, VOCAB_SIZE, 0.6))
    source, destination = Side(llama, **options), Side(llama, speculation, **options)
    assert hand_off(source, destination, prompt, PARAMS[name]) == expected
    assert 0 < destination.engine.counters.num_accepted < destination.engine.counters.num_drafted


def test_requests_of_one_batch_choose_whether_to_draft(llama: Path) -> None:
    answers = serve_alone(llama, PROMPTS, PARAMS)
    engine = drafting_engine(llama, checking_all(drafters(answers)["knowing"]()))
    params = {
        "greedy": replace(PARAMS["greedy"], speculate="off"),
        "sampled": replace(PARAMS["sampled"], speculate="auto"),
    }
    for name, chosen in params.items():
        engine.add_request(PROMPTS[name], chosen, request_id=name)
    outputs = drain(engine)
    for name in params:
        assert token_ids(outputs[name, 0]) == answers[name]
    metrics = {name: outputs[name, 0][-1].metrics for name in params}
    assert metrics["greedy"] is not None
    assert metrics["sampled"] is not None
    assert metrics["greedy"].drafts is None
    assert metrics["sampled"].drafts is not None
    assert metrics["sampled"].drafts.num_drafted > 0


def test_a_stop_string_inside_accepted_drafts_ends_the_answer_there(llama: Path) -> None:
    """The tokens behind it were chosen in the same step; they must be neither shown nor counted."""
    prompt = PROMPTS["greedy"]
    free = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    whole = tiny_engine(llama)
    request_id = whole.add_request(prompt, free)
    outputs = drain(whole)[request_id, 0]
    answer, all_text = token_ids(outputs), text(outputs)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=(all_text[5:8],))
    found = []
    for speculation in (None, checking_all(ReplayDrafter({tuple(prompt): answer}, VOCAB_SIZE))):
        engine = drafting_engine(llama, speculation)
        request_id = engine.add_request(prompt, params)
        outputs = drain(engine)[request_id, 0]
        metrics = outputs[-1].metrics
        assert metrics is not None
        last = outputs[-1]
        found.append(
            (token_ids(outputs), text(outputs), metrics.num_output_tokens, last.finish_reason, last.stop_reason)
        )
    assert engine.counters.num_accepted > 0
    assert found[0] == found[1]


def test_an_end_inside_accepted_drafts_ends_the_answer_there(llama: Path) -> None:
    prompt = PROMPTS["greedy"]
    answer = serve_alone(llama, {"r": prompt}, {"r": PARAMS["greedy"]})["r"]
    params = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(answer[4],))
    engine = drafting_engine(llama, checking_all(ReplayDrafter({tuple(prompt): answer}, VOCAB_SIZE)))
    request_id = engine.add_request(prompt, params)
    assert token_ids(drain(engine)[request_id, 0]) == answer[: answer.index(answer[4]) + 1]


@pytest.mark.parametrize("budget", [0, 1, 4, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_thinking_budget_that_ends_amid_drafts_is_kept_to_the_token(
    llama: Path, budget: int, temperature: float
) -> None:
    """The end of thinking is forced at a position of its own, and the grammar begins behind it."""
    reasoning = Reasoning((), (10, 11), is_open=True, max_tokens=budget)
    grammar = regex_grammar("([a-c]{2}-[0-9]{2} ){3,}")
    params = SamplingParams(
        max_tokens=30, seed=8, temperature=temperature, logprobs=1, grammar=grammar, reasoning=reasoning
    )
    prompt = PROMPTS["greedy"]
    answer = serve_alone(llama, {"r": prompt}, {"r": params})["r"]
    end = next(index for index in range(len(answer)) if answer[index : index + 2] == [10, 11])
    assert end <= budget
    for acceptance in (1.0, 0.6):
        drafter = ReplayDrafter({tuple(prompt): answer}, VOCAB_SIZE, acceptance)
        engine = drafting_engine(llama, checking_all(drafter))
        engine.add_request(prompt, params, request_id="r")
        assert token_ids(drain(engine)["r", 0]) == answer
        assert engine.counters.num_accepted > 0


def _chi_square(num_draws: int, guess: Callable[[int], int]) -> tuple[float, int]:
    """Pearson's statistic of the first two tokens against the exact distribution, and its degrees of freedom.

    guess: names a draft of the first, given the token that will be drawn.
    """
    vocab_size = 6
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(vocab_size, generator=generator)
    after = torch.randn(vocab_size, vocab_size, generator=generator)
    sampler = Sampler()
    params = SamplingParams(temperature=0.8)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(num_draws):
        drawn = sampler.sample(first[None], [SamplingState(params, seed, (), (), (), vocab_size)])[0].token_id
        draft = [guess(drawn)]
        state = SamplingState(params, seed, (), (), (), vocab_size)
        tokens = choose_tokens(sampler, torch.stack([first, after[draft[0]]]), [state], [draft], None)[0]
        if len(tokens) == 1:  # the draft was wrong, so the next step computes what follows the token chosen
            tokens += choose_tokens(sampler, after[tokens[0].token_id][None], [state], [[]], None)[0]
        counts[tokens[0].token_id, tokens[1].token_id] += 1
    p_first, p_after = (first / 0.8).softmax(0), (after / 0.8).softmax(1)
    expected = {
        (a, b): num_draws * float(p_first[a] * p_after[a, b]) for a in range(vocab_size) for b in range(vocab_size)
    }
    return sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items()), vocab_size**2 - 1


@pytest.mark.parametrize("drafter", ["constant", "blind", "knowing", "lying"])
@pytest.mark.parametrize("num_draws", [1500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_sampled_tokens_keep_the_distribution(drafter: str, num_draws: int) -> None:
    generator = random.Random(2)
    ways: dict[str, Callable[[int], int]] = {
        "constant": lambda _: 0,
        "blind": lambda _: generator.randrange(6),
        "knowing": lambda drawn: drawn,
        "lying": lambda drawn: (drawn + 1) % 6,
    }
    statistic, freedom = _chi_square(num_draws, ways[drafter])
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # some four standard deviations
