"""Answers held to grammars and budgets by a whole engine: they match, and are the same however they are computed."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.core.types import FinishReason
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.rpc.messages import GenerateCall
from tandem.scheduler.request import Handoff
from tandem.text.grammar import choice_grammar, lark_grammar, regex_grammar, schema_grammar
from tandem.text.grammar_sandbox import GrammarSandbox, Trial
from tests.helpers.checkpoints import BUILDERS
from tests.helpers.engines import drain, least_kv_cache_bytes, serve_alone, text, tiny_engine, token_ids
from tests.helpers.grammars import schema_faults
from tests.helpers.handoff import Side, hand_off
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.helpers.workers import Pair, at_rest, generated, pair_of

EOS = NUM_TOKENS - 1
IM_START = NUM_TOKENS - 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bé"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "über 你"]
Check = Callable[[str], object]
GRAMMARS: dict[str, tuple[str, Check]] = {
    "schema": (schema_grammar(PERSON), lambda answer: not schema_faults(json.loads(answer), PERSON, PERSON)),
    "choice": (choice_grammar(CHOICES), CHOICES.__contains__),
    "regex": (regex_grammar("[a-z]{3,9}-[0-9]{2}"), lambda answer: re.fullmatch("[a-z]{3,9}-[0-9]{2}", answer)),
    "unicode": (regex_grammar("[äöüß你]{4}"), lambda answer: re.fullmatch("[äöüß你]{4}", answer)),
    "lark": (lark_grammar('start: ITEM ("," ITEM)~1..3\nITEM: "x" | "yy"\n'), lambda a: 2 <= len(a.split(",")) <= 4),
}
THINKING = Reasoning((IM_START,), (10, 11), is_open=True, max_tokens=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits are wider than its tokenizer."""
    path = tmp_path_factory.mktemp("qwen3")
    BUILDERS["qwen3"](path, vocab_size=NUM_TOKENS + 61, eos_token_id=EOS)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return tiny_engine(checkpoint)


def _params(grammar: str, seed: int, **options: Any) -> SamplingParams:
    options = {"temperature": (0.0, 0.7, 1.5)[seed % 3], "max_tokens": 200, **options}
    return SamplingParams(grammar=grammar, seed=seed, **options)


def _mix() -> dict[str, tuple[list[int], SamplingParams]]:
    """Grammars of every kind, half of the answers with thinking before them, some with other options beside."""
    rng = random.Random(3)
    requests = {}
    for index, (grammar, _) in enumerate([*GRAMMARS.values()] * 2):
        reasoning = THINKING if index % 2 else None
        options: dict[str, Any] = (
            {"top_k": 0, "logprobs": 2} if index % 3 else {"repetition_penalty": 1.2, "top_p": 0.9}
        )
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        requests[f"r{index}"] = (prompt, _params(grammar, index, max_tokens=60, reasoning=reasoning, **options))
    requests["free"] = ([65, 66], SamplingParams(temperature=0.0, max_tokens=20))
    return requests


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    mix = _mix()
    prompts, params = ({name: pair[i] for name, pair in mix.items()} for i in (0, 1))
    return serve_alone(checkpoint, prompts, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAMMARS)
def test_whatever_a_random_model_says_matches(engine: Engine, name: str) -> None:
    grammar, matches = GRAMMARS[name]
    for seed in range(9):
        engine.add_request([seed, 7, 8], _params(grammar, seed), request_id=f"{seed}")
    num_stopped = 0
    for outputs in drain(engine).values():
        if outputs[-1].finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert token_ids(outputs)[-1] == EOS
            assert matches(text(outputs)), text(outputs)
    assert num_stopped >= 5


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 256}, id="batched"),
        pytest.param({"max_num_batched_tokens": 11, "max_num_running": 11}, id="chunked"),
        pytest.param({"prefix_caching": False, "block_size": 8}, id="uncached"),
    ],
)
def test_any_schedule_gives_the_same_tokens(
    checkpoint: Path, expected: dict[str, list[int]], options: dict[str, object]
) -> None:
    engine = tiny_engine(checkpoint, **options)
    for name, (prompt, params) in _mix().items():
        engine.add_request(prompt, params, request_id=name)
    assert {name: token_ids(outputs) for (name, _), outputs in drain(engine).items()} == expected


def test_preempted_equals_undisturbed(checkpoint: Path) -> None:
    mix = {name: (prompt[:14], params) for name, (prompt, params) in _mix().items()}
    size = least_kv_cache_bytes(checkpoint, 80, 16, "float32")
    engine = tiny_engine(
        checkpoint, kv_cache_bytes=size, max_model_len=80, max_num_batched_tokens=16, max_num_running=4
    )
    for name, (prompt, params) in mix.items():
        engine.add_request(prompt, params, request_id=name)
    served = {name: token_ids(outputs) for (name, _), outputs in drain(engine).items()}
    assert engine.counters.num_preemptions >= 3
    prompts, params_of = ({name: pair[i] for name, pair in mix.items()} for i in (0, 1))
    assert served == serve_alone(checkpoint, prompts, params_of)  # type: ignore[arg-type]


def test_no_step_waits_for_a_compiler(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for any number of grammars since a request was queued, and after its preemption."""
    monkeypatch.setattr("tandem.text.grammars.MAX_CACHED", 1)
    mix = {name: (prompt[:14], params) for name, (prompt, params) in _mix().items()}
    size = least_kv_cache_bytes(checkpoint, 80, 16, "float32")
    engine = tiny_engine(
        checkpoint, kv_cache_bytes=size, max_model_len=80, max_num_batched_tokens=16, max_num_running=4
    )
    for name, (prompt, params) in mix.items():
        engine.add_request(prompt, params, request_id=name)
    tried: list[str] = []
    monkeypatch.setattr(GrammarSandbox, "trial", lambda _, grammar: tried.append(grammar))
    for outputs in drain(engine).values():
        assert outputs[-1].finish_reason is not FinishReason.ERROR
    assert engine.counters.num_preemptions >= 3
    assert tried == []


def test_a_request_that_waits_for_a_long_step_is_not_compiled_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time the engine takes it, others' grammars have come."""
    monkeypatch.setattr("tandem.text.grammars.MAX_CACHED", 1)
    engine = tiny_engine(checkpoint)
    assert engine.grammars is not None
    take, check, trial = engine.add_request, engine.grammars.compiled, GrammarSandbox.trial
    tried: list[str] = []

    def trial_of(sandbox: GrammarSandbox, grammar: str) -> Trial:
        tried.append(grammar)
        return trial(sandbox, grammar)

    def take_late(*arguments: Any, **options: Any) -> str:
        check(choice_grammar(["other"]))
        return take(*arguments, **options)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            outputs = [output async for output in serving.generate("x", _params(GRAMMARS["choice"][0], 1))]
            assert outputs[-1].finish_reason is FinishReason.STOP

    monkeypatch.setattr(GrammarSandbox, "trial", trial_of)
    monkeypatch.setattr(engine, "add_request", take_late)
    asyncio.run(main())
    assert tried == [GRAMMARS["choice"][0], choice_grammar(["other"])]


@pytest.mark.parametrize("name", ["r0", "r1", "r2", "r3"])
def test_handed_over_equals_alone(checkpoint: Path, expected: dict[str, list[int]], name: str) -> None:
    source, destination = Side(checkpoint, block_size=8), Side(checkpoint, block_size=8)
    prompt, params = _mix()[name]
    assert hand_off(source, destination, prompt, params) == expected[name]


@pytest.mark.parametrize("name", ["r0", "r1", "r2", "r9"])
def test_an_answer_taken_over_at_any_point_goes_on_exactly(
    checkpoint: Path, expected: dict[str, list[int]], name: str
) -> None:
    prompt, params = _mix()[name]
    engine = tiny_engine(checkpoint)
    for num_tokens in range(1, len(expected[name]), 1 if len(expected[name]) < 30 else 4):
        begun = tuple(expected[name][:num_tokens])
        engine.add_request(prompt, params, request_id="r", handoff=Handoff(output_token_ids=begun))
        assert token_ids(drain(engine)["r", 0]) == expected[name][num_tokens:]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_budget_is_kept_to_the_token(engine: Engine, budget: int, temperature: float) -> None:
    reasoning = Reasoning((), (10, 11), is_open=True, max_tokens=budget)
    params = _params(GRAMMARS["regex"][0], 4, temperature=temperature, reasoning=reasoning)
    for index in range(4):
        engine.add_request([index, 3], replace(params, seed=index), request_id=f"{index}")
    for outputs in drain(engine).values():
        tokens = token_ids(outputs)
        end = next(i for i in range(len(tokens)) if tokens[i : i + 2] == [10, 11])
        assert end <= budget
        assert EOS not in tokens[:end]
        assert engine.tokenizer is not None
        assert GRAMMARS["regex"][1](engine.tokenizer.decode(tokens[end + 2 : -1]))


def test_every_choice_matches(engine: Engine) -> None:
    grammar, matches = GRAMMARS["choice"]
    engine.add_request("abc", SamplingParams(grammar=grammar, n=6, seed=3, max_tokens=50), request_id="r")
    answers = [text(outputs) for outputs in drain(engine).values()]
    assert len(answers) == 6
    assert all(map(matches, answers))
    assert len(set(answers)) > 1


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """Of a forced token too: what the model thought of it before the grammar spoke."""
    engine.add_request(
        "abc", SamplingParams(grammar=choice_grammar(["zz"]), temperature=0.0, logprobs=3), request_id="r"
    )
    first = drain(engine)["r", 0][0].logprobs
    engine.add_request("abc", SamplingParams(temperature=0.0, logprobs=3, max_tokens=1), request_id="r")
    free = drain(engine)["r", 0][0].logprobs
    assert first is not None
    assert free is not None
    assert first[0].top == free[0].top
    assert first[0].logprob < free[0].logprob


def test_a_model_without_an_end_ends_with_its_grammar(tmp_path: Path) -> None:
    BUILDERS["llama"](tmp_path, vocab_size=NUM_TOKENS, eos_token_id=None)
    settings = write_byte_tokenizer(tmp_path) / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    engine = tiny_engine(tmp_path)
    assert not engine.model.eos_token_ids
    params = SamplingParams(grammar=choice_grammar(["abc"]), max_tokens=50, seed=1, stop=("cd",))
    engine.add_request("x", params, request_id="r")
    outputs = drain(engine)["r", 0]
    assert (text(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == ("abc", FinishReason.STOP, None)
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.num_output_tokens == 3


def test_an_answer_that_ends_before_its_first_token_has_the_scores_of_its_prompt(tmp_path: Path) -> None:
    BUILDERS["llama"](tmp_path, vocab_size=NUM_TOKENS, eos_token_id=None)
    settings = write_byte_tokenizer(tmp_path) / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    engine = tiny_engine(tmp_path)
    scores: list[object] = []
    for grammar in (lark_grammar('start: ""\n'), choice_grammar(["a"])):
        engine.add_request("xyz", SamplingParams(grammar=grammar, prompt_logprobs=1), request_id="r")
        outputs = drain(engine)["r", 0]
        assert outputs[-1].finish_reason is FinishReason.STOP
        scores += [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(scores) == 2
    assert scores[0] == scores[1]


def test_a_stop_string_ends_an_answer_inside_its_grammar(engine: Engine) -> None:
    params = SamplingParams(grammar=choice_grammar(["one two"]), stop=(" ",), temperature=0.0)
    engine.add_request("x", params, request_id="r")
    outputs = drain(engine)["r", 0]
    assert (text(outputs), outputs[-1].stop_reason) == ("one", " ")


def test_an_impossible_combination_fails_alone(engine: Engine) -> None:
    engine.add_request("x", SamplingParams(grammar=choice_grammar(["a"]), allowed_token_ids=(3,)), request_id="bad")
    engine.add_request("x", SamplingParams(grammar=choice_grammar(["a"])), request_id="good")
    outputs = drain(engine)
    assert outputs["bad", 0][-1].finish_reason is FinishReason.ERROR
    assert "grammar" in str(outputs["bad", 0][-1].stop_reason)
    assert text(outputs["good", 0]) == "a"


def test_special_tokens_are_shown_when_asked_for(engine: Engine) -> None:
    grammar = lark_grammar('start: "a" <|im_start|> "b"\n')
    shown: dict[bool, str] = {}
    for skip in (True, False):
        engine.add_request("x", SamplingParams(grammar=grammar, skip_special_tokens=skip), request_id="r")
        outputs = drain(engine)["r", 0]
        assert token_ids(outputs)[-1] == EOS
        shown[skip] = text(outputs)
    assert shown == {True: "ab", False: "a<|im_start|>b"}
    params = SamplingParams(
        grammar=grammar, skip_special_tokens=False, stop=("<|im_start|>",), include_stop_str_in_output=True
    )
    engine.add_request("x", params, request_id="r")
    outputs = drain(engine)["r", 0]
    assert (text(outputs), outputs[-1].stop_reason) == ("a<|im_start|>", "<|im_start|>")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(grammar="{"),
        SamplingParams(grammar=lark_grammar("start: missing\n")),
        SamplingParams(reasoning=Reasoning((), (NUM_TOKENS + 61,))),
    ],
    ids=["garbage", "missing rule", "unknown marker"],
)
def test_what_cannot_be_honoured_is_refused(engine: Engine, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError):
        engine.add_request("x", params)
    assert not engine.has_work


def test_an_async_engine_compiles_beside_its_steps_and_leaves_no_thread(checkpoint: Path) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        async with AsyncEngine(tiny_engine(checkpoint)) as serving:
            params = [_params(grammar, 1) for grammar, _ in GRAMMARS.values()]

            async def answer(number: int) -> str:
                return "".join([o.text async for o in serving.generate("x", params[number % 5])])

            answers = await asyncio.gather(*map(answer, range(10)))
            assert answers[:5] == answers[5:]
            with pytest.raises(InvalidRequestError, match="missing"):
                async for _ in serving.generate("x", SamplingParams(grammar=lark_grammar("start: missing\n"))):
                    pass
        assert {thread for thread in threading.enumerate() if thread.name.startswith("tandem")} <= before

    asyncio.run(main())


@pytest.mark.parametrize("name", ["r0", "r1", "r9"])
def test_two_workers_give_the_same_tokens(checkpoint: Path, name: str) -> None:
    prompt, params = _mix()[name]
    whole = serve_alone(checkpoint, {"r": prompt}, {"r": params}, block_size=8)["r"]

    async def main() -> None:
        async with pair_of(checkpoint) as pair:
            call = GenerateCall(
                request_id="r",
                prompt_token_ids=tuple(prompt),
                params=params,
                prefill=pair.prefill.core.me,
                scope=UNSCOPED,
            )
            assert await generated(pair.to_decode, call) == whole
            begun = replace(call, output_token_ids=tuple(whole[:3]))
            assert await generated(pair.to_decode, begun) == whole[3:]
            await _refused(pair, call)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


async def _refused(pair: Pair, call: GenerateCall) -> None:
    wrong = replace(call, params=replace(call.params, grammar="start: missing\n"))
    with pytest.raises(InvalidRequestError, match="missing"):
        await generated(pair.to_decode, wrong)
