"""Drafts of models with recurrent layers, whose states cannot be rewound: tokens and bits are those without drafts.

On the compiled kernels, which compute a token's state as they would without what is behind it, and in bfloat16, where
near ties are common.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.engine import Engine
from tandem.scheduler.request import Handoff
from tests.helpers.engines import drafting_engine, drain, least_kv_cache_bytes, tiny_engine, token_ids
from tests.helpers.handoff import Side, hand_off
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.unit.engine.test_speculation import PARAMS, PROMPTS, VOCAB_SIZE, checking_all, drafters, prompt_of

QUICK = ("lfm2", "granite_hybrid", "qwen3_next", "kimi_linear")  # a convolution, Mamba-2, the delta rule, by column
FAMILIES = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in RECURRENT_BUILDERS
]
EXHAUSTIVE = [f if f == "granite_hybrid" else pytest.param(f, marks=pytest.mark.slow) for f in RECURRENT_BUILDERS]
NATIVE = {
    "dtype": "bfloat16",
    "native_kernels": True,
    "attention_backend": "native",
    "block_size": 8,
    "kv_cache_bytes": 4 << 20,
}


def checkpoint_of(family: str, directory: Path) -> Path:
    load_or_skip()
    return write_byte_tokenizer(RECURRENT_BUILDERS[family](directory))


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("granite_hybrid", tmp_path_factory.mktemp("granite"))


def served(engine: Engine, round_: int = 0) -> dict[str, list[RequestOutput]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, PARAMS[name], request_id=f"{name} {round_}")
    outputs = drain(engine)
    return {name: outputs[f"{name} {round_}", 0] for name in PROMPTS}


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    request_id = engine.add_request(prompt, params)
    return drain(engine)[request_id, 0]


def tokens_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {name: token_ids(each) for name, each in outputs.items()}


def logprobs_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[object]]:
    return {name: [entry for output in each for entry in output.logprobs or ()] for name, each in outputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_bits_are_those_without_drafts(family: str, tmp_path: Path) -> None:
    """Bits are told by logprobs; penalties, bias and grammars are among the requests."""
    path = checkpoint_of(family, tmp_path)
    plain = served(drafting_engine(path, None, **NATIVE))
    engine = drafting_engine(path, checking_all(drafters(tokens_of(plain))["half"]()), **NATIVE)
    found = served(engine)
    assert tokens_of(found) == tokens_of(plain)
    assert logprobs_of(found) == logprobs_of(plain)
    assert 0 < engine.counters.num_accepted < engine.counters.num_drafted


@pytest.mark.parametrize("name", ["knowing", "lying", "ngram"])
def test_every_drafter_leaves_the_tokens_as_they_are(granite: Path, name: str) -> None:
    """Eight further tokens at a time cross a block's end in most steps."""
    plain = tokens_of(served(drafting_engine(granite, None, **NATIVE)))
    engine = drafting_engine(granite, checking_all(drafters(plain)[name]()), **NATIVE)
    assert tokens_of(served(engine)) == plain
    assert engine.counters.num_drafted > 0


@pytest.mark.parametrize("family", EXHAUSTIVE)
def test_chunks_hits_preemption_and_aborts_change_nothing(family: str, tmp_path: Path) -> None:
    path = checkpoint_of(family, tmp_path)
    plain = tokens_of(served(drafting_engine(path, None, **NATIVE)))
    model_len = 128
    num_bytes = least_kv_cache_bytes(path, model_len, 48, "bfloat16")
    num_preemptions = num_cached = 0
    for times in (1.25, 1.75):  # in the smaller pool states are in the way of others, in the larger some are kept
        engine = drafting_engine(
            path,
            checking_all(drafters(plain)["half"]()),
            **NATIVE
            | {
                "max_num_batched_tokens": 48,
                "max_num_running": 8,
                "max_model_len": model_len,
                "kv_cache_bytes": int(times * num_bytes),
                "block_size": 32,  # most prompts are one block, so that more are admitted than states have room for
            },
        )
        for round_ in range(2):
            for name, prompt in PROMPTS.items():
                engine.add_request(prompt, PARAMS[name], request_id=f"{name} {round_}")
            aborted = engine.add_request(prompt_of(99, 30), PARAMS["greedy"])
            begun = [output for _ in range(9) for output in engine.step()]
            engine.abort(aborted)
            tokens = {f"{name} {round_}": list[int]() for name in PROMPTS} | {aborted: []}
            for output in begun + [output for outputs in drain(engine).values() for output in outputs]:
                tokens[output.request_id] += output.token_ids
            assert {name: tokens[f"{name} {round_}"] for name in PROMPTS} == plain
        again = answer(engine, PROMPTS["filtered"], PARAMS["filtered"])
        assert token_ids(answer(engine, PROMPTS["filtered"], PARAMS["filtered"])) == token_ids(again)
        assert token_ids(again) == plain["filtered"]
        assert engine.counters.num_accepted > 0
        num_preemptions += engine.counters.num_preemptions
        num_cached += engine.counters.num_cached_prompt_tokens
    assert num_preemptions > 0 or family == "mamba2"  # whose requests do not grow
    assert num_cached > 0


def test_a_chat_goes_on_from_the_states_of_an_answer_with_drafts(granite: Path) -> None:
    """Answers end at any place of a block, before drafts that were right; the next turn finds the last whole block."""
    prompt, free = PROMPTS["greedy"], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    whole = token_ids(answer(tiny_engine(granite, **NATIVE), prompt, free))
    plain = drafting_engine(granite, None, **NATIVE)
    drafting = drafting_engine(granite, checking_all(ReplayDrafter({tuple(prompt): whole}, VOCAB_SIZE)), **NATIVE)
    last = [place for place in range(18, 27) if whole.index(whole[place]) == place]
    assert len(last) > 6
    for place in last:
        told, cached = [], []
        for engine in (plain, drafting):
            begun = answer(engine, prompt, replace(free, stop_token_ids=(whole[place],)))
            assert token_ids(begun) == whole[: place + 1]
            before = engine.counters.num_cached_prompt_tokens
            turn = [*prompt, *whole[: place + 1], *PROMPTS["sampled"]]
            told.append([(each.token_ids, each.logprobs) for each in answer(engine, turn, PARAMS["greedy"])])
            cached.append(engine.counters.num_cached_prompt_tokens - before)
        assert told[0] == told[1]
        assert cached[0] == cached[1] >= (len(prompt) + place) // 8 * 8, place
    assert drafting.counters.num_accepted > 50


def test_every_choice_of_a_request_is_exact(granite: Path) -> None:
    params = SamplingParams(max_tokens=20, seed=3, n=3, ignore_eos=True)
    found = []
    for speculation in (None, checking_all(NgramDrafter(1))):
        engine = drafting_engine(granite, speculation, **NATIVE)
        request_id = engine.add_request(PROMPTS["greedy"] * 3, params)
        outputs = drain(engine)
        found.append([token_ids(outputs[request_id, index]) for index in range(3)])
    assert engine.counters.num_drafted > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_what_another_worker_began_is_exact(granite: Path, name: str) -> None:
    """The decode worker drafts from the first step, from a state that it never computed."""
    prompt = PROMPTS["filtered"][:20] * 3
    expected = token_ids(answer(tiny_engine(granite, **NATIVE), prompt, PARAMS[name]))
    speculation = checking_all(ReplayDrafter({tuple(prompt): expected}, VOCAB_SIZE, 0.6))
    source, destination = Side(granite, **NATIVE), Side(granite, speculation, **NATIVE)
    assert hand_off(source, destination, prompt, PARAMS[name]) == expected
    assert 0 < destination.engine.counters.num_accepted < destination.engine.counters.num_drafted


@pytest.mark.parametrize("num_done", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 8, 13))])
@pytest.mark.parametrize("family", EXHAUSTIVE)
def test_answers_whose_worker_dies_amid_drafts_go_on_in_a_full_pool(family: str, num_done: int, tmp_path: Path) -> None:
    """They go on behind whatever drafts were accepted, on a worker that preempts them and drafts nothing right."""
    path = checkpoint_of(family, tmp_path)
    plain = tokens_of(served(drafting_engine(path, None, **NATIVE)))
    dying = drafting_engine(path, checking_all(drafters(plain)["half"]()), **NATIVE)
    for name, prompt in PROMPTS.items():
        dying.add_request(prompt, PARAMS[name], request_id=name)
    begun: dict[str, list[int]] = {name: [] for name in PROMPTS}
    ended: set[str] = set()
    while min(len(begun[name]) for name in begun if name not in ended) < num_done:
        for output in dying.step():
            begun[output.request_id] += output.token_ids
            ended |= {output.request_id} if output.finished else set()
    assert dying.counters.num_accepted > 0
    memory = int(1.5 * least_kv_cache_bytes(path, 128, 48, "bfloat16"))
    small = {"max_num_batched_tokens": 48, "max_num_running": 8, "max_model_len": 128, "kv_cache_bytes": memory}
    engine = drafting_engine(path, checking_all(drafters(plain)["lying"]()), **NATIVE | small)
    going_on = [name for name in begun if name not in ended]
    for name, copy in itertools.product(going_on, range(3)):
        handoff = Handoff(output_token_ids=tuple(begun[name]))
        engine.add_request(PROMPTS[name], PARAMS[name], request_id=f"{name} {copy}", handoff=handoff)
    rest = drain(engine)
    assert {name: begun[name] for name in ended} == {name: plain[name] for name in ended}
    for name, copy in itertools.product(going_on, range(3)):
        assert begun[name] + token_ids(rest[f"{name} {copy}", 0]) == plain[name]
    assert engine.counters.num_drafted > 0
    assert engine.counters.num_preemptions > 0 or family == "mamba2"  # whose requests do not grow
