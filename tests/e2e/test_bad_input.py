"""Requests that no caller should send: each is refused by name and remedy, and nobody else notices.

The same values go in through Python, the asynchronous face, flags and JSON lines. What others get meanwhile must be
what they get alone, and every block must be accounted for.
"""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = ["--dtype", "float32", "--no-native-kernels", "--attention-backend", "reference", "--kv-cache-gib", "0.01"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONGEST_MESSAGE = 1000
GOOD_PROMPT = "a request that does nothing wrong"

BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature-nan": ({"temperature": math.nan}, "temperature=nan"),
    "temperature-huge-integer": ({"temperature": 10**400}, "temperature="),
    "temperature-endless-integer": ({"temperature": 10**5000}, "temperature="),
    "temperature-none": ({"temperature": None}, "temperature=None"),
    "temperature-bool": ({"temperature": True}, "temperature=True"),
    "temperature-list": ({"temperature": [1.0] * 10**6}, "temperature="),
    "top-k-float": ({"top_k": 5.0}, "top_k=5.0"),
    "top-p-text": ({"top_p": "0.5"}, "top_p='0.5'"),
    "min-p-long-text": ({"min_p": "x" * 10**7}, "min_p="),
    "max-tokens-huge": ({"max_tokens": 10**5000}, "max_tokens="),
    "seed-huge": ({"seed": 2**200}, "seed="),
    "seed-negative": ({"seed": -(2**64)}, "seed="),
    "n-huge": ({"n": 10**9}, "n=1000000000"),
    "stop-million": ({"stop": ["x"] * 10**6}, "stop has 1000000 entries"),
    "stop-none": ({"stop": None}, "stop=None"),
    "stop-number": ({"stop": 5}, "stop=5"),
    "stop-mapping": ({"stop": {"a": 1}}, "stop="),
    "stop-bytes": ({"stop": (b"x",)}, "stop holds b'x'"),
    "stop-nested": ({"stop": [["x"]]}, "stop holds"),
    "stop-long": ({"stop": ["x" * 10**7]}, "10000000 characters"),
    "stop-surrogate": ({"stop": ["\ud800"]}, "not valid Unicode"),
    "logit-bias-huge": ({"logit_bias": dict.fromkeys(range(10**6), 1.0)}, "logit_bias has 1000000 entries"),
    "logit-bias-list": ({"logit_bias": [1, 2]}, "logit_bias="),
    "logit-bias-none": ({"logit_bias": None}, "logit_bias=None"),
    "logit-bias-text": ({"logit_bias": {1: "x"}}, "logit_bias[1]='x'"),
    "allowed-number": ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    "allowed-million": ({"allowed_token_ids": range(10**6)}, "allowed_token_ids="),
    "stop-tokens-none": ({"stop_token_ids": None}, "stop_token_ids=None"),
    "stop-tokens-nested": ({"stop_token_ids": [[1]]}, "stop_token_ids entry"),
    "bad-words-flat": ({"bad_words": [5]}, "bad_words entry=5"),
    "bad-words-text": ({"bad_words": ["abc"]}, "bad_words entry='abc'"),
    "bad-words-million": ({"bad_words": [[1]] * 10**6}, "bad_words has 1000000 entries"),
    "ignore-eos-text": ({"ignore_eos": "yes"}, "ignore_eos='yes'"),
    "include-stop-number": ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1"),
    "logprobs-huge": ({"logprobs": 10**9}, "logprobs=1000000000"),
}

BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty-text": ("", {}, "empty"),
    "empty-list": ([], {}, "empty"),
    "prompt-none": (None, {}, "NoneType"),
    "prompt-number": (5, {}, "int"),
    "prompt-bytes": (b"abc", {}, "bytes"),
    "prompt-generator": ((i for i in range(3)), {}, "generator"),
    "prompt-mapping": ({1: 2}, {}, "dict"),
    "prompt-nested": ([[1]], {}, "prompt token [1]"),
    "prompt-of-text": (["abc"], {}, "prompt token 'abc'"),
    "prompt-of-endless-integers": ([10**5000], {}, "prompt token"),
    "prompt-endless-range": (range(10**15), {}, "1000000000000000 tokens"),
    "prompt-too-long": ([1] * 256, {}, "256 tokens; the context of 256"),
    "text-too-long": ("x" * 300, {}, "the context of 256"),
    "text-endless": ("x" * 10**8, {}, "100000000 characters"),
    "token-out-of-range": ([NUM_TOKENS], {}, f"prompt token {NUM_TOKENS}"),
    "lone-surrogate": ("abc\ud800", {}, "not valid Unicode"),
    "stray-byte": (b"abc\xff".decode(errors="surrogateescape"), {}, "not valid Unicode"),
    "params-none": ("abc", {"params": None}, "params=None"),
    "params-mapping": ("abc", {"params": {"temperature": 0}}, "params="),
    "bias-out-of-range": ("abc", {"params": SamplingParams(logit_bias={10**6: 1.0})}, "logit_bias names token"),
    "context-exceeded": ("abc", {"params": SamplingParams(max_tokens=10**9)}, "exceed the context"),
    "id-empty": ("abc", {"request_id": ""}, "request_id=''"),
    "id-ten-megabytes": ("abc", {"request_id": "x" * 10**7}, "request_id='xxx"),
    "id-number": ("abc", {"request_id": 5}, "request_id=5"),
    "id-unhashable": ("abc", {"request_id": ["a"]}, "request_id=['a']"),
    "id-in-use": ("abc", {"request_id": "good"}, "request_id='good' is in use"),
    "scope-number": ("abc", {"scope": 5}, "scope=5"),
    "scope-adapter": ("abc", {"scope": CacheScope(adapter=bytes(32))}, f"scope.adapter={'00' * 32} is not loaded"),
    "priority-text": ("abc", {"priority": "high"}, "priority='high'"),
    "priority-nan": ("abc", {"priority": math.nan}, "priority=nan"),
    "priority-bool": ("abc", {"priority": True}, "priority=True"),
    "priority-endless": ("abc", {"priority": 10**5000}, "priority="),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    """One engine for all of this module: whatever it was sent before must not matter."""
    return tiny_engine(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """The good request's tokens on an engine that saw nothing else."""
    alone = tiny_engine(checkpoint)
    request_id = alone.add_request(GOOD_PROMPT, GREEDY)
    return token_ids(drain(alone)[request_id, 0])


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_values_are_named(name: str) -> None:
    fields, message = BAD_PARAMS[name]
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**fields)
    assert message in str(refused.value)
    assert len(str(refused.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_others_go_on(name: str, engine: Engine, expected: list[int]) -> None:
    prompt, options, message = BAD_REQUESTS[name]
    engine.add_request(GOOD_PROMPT, GREEDY, request_id="good")
    head = engine.step() + engine.step()
    with pytest.raises(InvalidRequestError) as refused:
        engine.add_request(prompt, **{"params": GREEDY, **options})
    assert message in str(refused.value)
    assert len(str(refused.value)) < LONGEST_MESSAGE
    engine.check()
    assert token_ids(head + drain(engine)["good", 0]) == expected
    assert engine.kv_usage.used == 0


def test_bad_requests_among_good_ones_on_the_asynchronous_face(engine: Engine, expected: list[int]) -> None:
    async def ask(serving: AsyncEngine, prompt: Any, options: dict[str, Any]) -> list[int]:
        stream = serving.generate(prompt, **{"params": GREEDY, **options})
        return token_ids([output async for output in stream])

    async def run() -> tuple[list[Any], list[Any]]:
        async with AsyncEngine(engine) as serving:
            holder = serving.generate(GOOD_PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="good")
            await anext(holder)
            bad = [ask(serving, prompt, options) for prompt, options, _ in BAD_REQUESTS.values()]
            good = [ask(serving, GOOD_PROMPT, {}) for _ in range(10)]
            answers = await asyncio.gather(*bad, *good, return_exceptions=True)
            await holder.aclose()  # type: ignore[attr-defined]
            return list(answers[: len(bad)]), list(answers[len(bad) :])

    refusals, answers = asyncio.run(asyncio.wait_for(run(), 60))
    for refusal, (_, _, message) in zip(refusals, BAD_REQUESTS.values(), strict=True):
        assert isinstance(refusal, InvalidRequestError), refusal
        assert message in str(refusal)
    assert answers == [expected] * 10
    engine.check()
    assert engine.kv_usage.used == 0


def test_ids_that_imitate_ours_do_not_refuse_others(engine: Engine) -> None:
    """A caller who names requests as the engine numbers its own once made the next unnamed request fail."""
    for number in range(2000):
        engine.add_request("abc", SamplingParams(max_tokens=1), request_id=f"request-{number}")
    assert engine.add_request("abc", SamplingParams(max_tokens=1)) not in {f"request-{i}" for i in range(2000)}
    drain(engine)


def test_odd_text_that_is_text_is_served(engine: Engine) -> None:
    """Null bytes, controls, line separators, combining marks and characters beyond the basic plane are just text."""
    for prompt in ("\0", "a\0b\r\n\u2028\u2029\x85", "\ufeff", "e\u0301" * 50, "\U0001f469\u200d\U0001f4bb", "\uffff"):
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=3, stop=("\0", "\u2028"), seed=1))
        assert drain(engine)[request_id, 0][-1].finished


def test_options_are_copies() -> None:
    """A list that its owner changes after validation must not change what was validated."""
    stops, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stops, logit_bias=bias)  # type: ignore[arg-type]
    stops.append("b" * 10**6)
    bias[-1] = math.nan
    assert (params.stop, params.logit_bias) == (("a",), {1: 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "1e999"], "temperature=inf"),
        (["--temperature", "-0.5"], "temperature=-0.5"),
        (["--top-k", "1" * 30], "top_k="),
        (["--top-k", "9" * 5000], "--top-k"),
        (["-n", "1000000000"], "n=1000000000"),
        (["--seed", "9" * 40], "seed="),
        (["--max-tokens", "1000000000"], "exceed the context"),
        (["--stop", ""], "stop"),
        (["--stop-token-ids", "-1"], "stop_token_ids"),
        (["--stop-token-ids", "999999"], "stop_token_ids names token 999999"),
        (["--kv-cache-gib", "inf"], "--kv-cache-gib"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib"),
        (["--kv-cache-gib", "1e300"], "--kv-cache-gib"),
        (["--kv-cache-gib", "100000"], "kv_cache_bytes"),
        (["--kv-cache-gib", "0.000001"], "kv_cache_bytes"),
        (["--max-num-running", "1000000000"], "max_num_running"),
        (["--max-num-running", "0"], "max_num_running"),
        (["--max-num-batched-tokens", "1000000000000"], "max_num_batched_tokens"),
        (["--max-num-waiting", "0"], "max_num_waiting"),
        (["--max-model-len", "1000000000"], "max_model_len"),
        (["--max-model-len", "1"], "max_model_len"),
        (["--num-threads", "0"], "num_threads"),
        (["--num-threads", "1000000000"], "num_threads"),
        (["--device", "cuda:99999999999999999999"], "cuda:"),
        (["--device", "cuda:-1"], "cuda:"),
        (["--device", "cpu:5"], "cpu:5"),
        (["--output", "/nowhere/at/all/out.jsonl"], "/nowhere/at/all"),
    ],
)
def test_bad_flags_are_one_clear_line(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(checkpoint), "--prompt", "abc", *FLAGS, *arguments]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err) < LONGEST_MESSAGE
    assert captured.out == ""
