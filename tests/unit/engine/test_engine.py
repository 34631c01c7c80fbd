"""The engine over a real tiny model: what callers see of adding, stepping, stopping, aborting and failing."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.attention import ReferenceBackend
from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.types import FinishReason
from tandem.engine.engine import Engine
from tandem.engine.randomness import choice_seed
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import drain, text, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1)
    return write_byte_tokenizer(path)


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return tiny_engine(checkpoint)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})  # type: ignore[arg-type]


def generate(engine: Engine, prompt: str | list[int], params: SamplingParams) -> list[int]:
    request_id = engine.add_request(prompt, params)
    return token_ids(drain(engine)[request_id, 0])


def test_text_prompt_equals_its_tokens(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("hello there", add_special_tokens=True)
    assert generate(engine, "hello there", GREEDY) == generate(engine, ids, GREEDY)


def test_text_is_the_decoded_tokens(engine: Engine) -> None:
    assert engine.tokenizer is not None
    request_id = engine.add_request("some text", GREEDY)
    outputs = drain(engine)[request_id, 0]
    assert text(outputs) == engine.tokenizer.decode(token_ids(outputs), skip_special_tokens=True)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(token_ids(outputs)) == 24


def test_metrics_come_with_the_last_output_only(engine: Engine) -> None:
    request_id = engine.add_request(list(range(40)), GREEDY)
    outputs = drain(engine)[request_id, 0]
    assert [output.metrics is None for output in outputs] == [False] + [True] * 22 + [False]
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_cached_tokens) == (40, 24, 0)
    assert metrics.ttft_s is not None
    assert metrics.tpot_s is not None


def test_a_step_runs_on_the_device_of_its_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention must find that device chosen, in any thread that steps the engine."""
    current = threading.local()
    seen: dict[int, set[torch.device | None]] = {}
    attend = ReferenceBackend.attend

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.device = device
        yield
        del current.device

    def watched(*arguments: Any) -> torch.Tensor:
        seen.setdefault(threading.get_ident(), set()).add(getattr(current, "device", None))
        return attend(*arguments)

    monkeypatch.setattr("tandem.engine.runner.current_device", chosen)
    monkeypatch.setattr(ReferenceBackend, "attend", watched)
    prompt, params = list(range(40)), greedy(max_tokens=2)
    generate(engine, prompt, params)
    with ThreadPoolExecutor(1) as other:
        other.submit(generate, engine, prompt, params).result()
    generate(engine, prompt, params)
    assert list(seen.values()) == [{torch.device("cpu")}] * 2


def test_a_step_is_as_long_as_it_would_be_without_borrowed_cores(engine: Engine) -> None:
    engine.borrowed_s = itertools.count(0.0, 1000.0).__next__
    generate(engine, list(range(40)), GREEDY)
    durations_s = [step.duration_s for step in engine.take_step_stats()]
    assert len(durations_s) == 24
    assert all(1000.0 < duration_s < 2000.0 for duration_s in durations_s)


def test_second_request_reports_its_cached_tokens(engine: Engine) -> None:
    generate(engine, list(range(40)), GREEDY)
    request_id = engine.add_request(list(range(40)), GREEDY)
    metrics = drain(engine)[request_id, 0][-1].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 32


def test_a_salt_separates_the_cache(engine: Engine) -> None:
    prompt = list(range(40))
    generate(engine, prompt, GREEDY)
    request_id = engine.add_request(prompt, GREEDY, scope=CacheScope(salt="other tenant"))
    metrics = drain(engine)[request_id, 0][-1].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 0


def test_stop_token_ends_the_request_and_is_not_shown(engine: Engine) -> None:
    expected = generate(engine, "abc", GREEDY)
    stop = expected[5]
    first = expected.index(stop)
    request_id = engine.add_request("abc", greedy(stop_token_ids=(stop,)))
    outputs = drain(engine)[request_id, 0]
    assert token_ids(outputs) == expected[: first + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)
    assert engine.tokenizer is not None
    assert text(outputs) == engine.tokenizer.decode(expected[:first], skip_special_tokens=True)


def test_eos_ends_the_request_unless_ignored(checkpoint: Path, tmp_path: Path) -> None:
    expected = generate(tiny_engine(checkpoint), "abc", GREEDY)
    eos = expected[7]
    save_tiny_llama(tmp_path, vocab_size=NUM_TOKENS, eos_token_id=eos)
    engine = tiny_engine(write_byte_tokenizer(tmp_path))
    stopped = generate(engine, "abc", greedy(ignore_eos=False))
    assert stopped == expected[: expected.index(eos) + 1]
    assert generate(engine, "abc", GREEDY) == expected


def test_min_tokens_keeps_going(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    stop = generate(engine, "abc", GREEDY)[0]
    tokens = generate(engine, "abc", greedy(stop_token_ids=(stop,), min_tokens=6))
    assert len(tokens) >= 6
    assert stop not in tokens[:5]


@pytest.mark.parametrize("included", [False, True])
def test_stop_string_trims_exactly(engine: Engine, included: bool) -> None:
    request_id = engine.add_request("abc", GREEDY)
    whole = text(drain(engine)[request_id, 0])
    stop = whole[4:7]
    at = whole.index(stop)
    request_id = engine.add_request("abc", greedy(stop=(stop,), include_stop_str_in_output=included))
    outputs = drain(engine)[request_id, 0]
    assert text(outputs) == whole[: at + len(stop) if included else at]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


def test_n_gives_distinct_choices_that_share_the_prompt(engine: Engine) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    request_id = engine.add_request(list(range(64)), params)
    outputs = drain(engine)
    answers = [token_ids(outputs[request_id, index]) for index in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert engine.counters.num_cached_prompt_tokens == 3 * 48
    alone = generate(engine, list(range(64)), SamplingParams(seed=choice_seed(7, 2), max_tokens=12, ignore_eos=True))
    assert alone == answers[2]


def test_unseeded_requests_differ_and_follow_the_engine_seed(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        engine = tiny_engine(checkpoint, seed=seed)
        runs.append((generate(engine, "abc", params), generate(engine, "abc", params)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_logprobs_match_prompt_logprobs_of_the_answer(engine: Engine) -> None:
    """Scoring prompt + answer as a prompt must give the logprobs that generation reported."""
    request_id = engine.add_request("abc", greedy(logprobs=3))
    outputs = drain(engine)[request_id, 0]
    generated = [entry for output in outputs for entry in output.logprobs or ()]
    assert [entry.token_id for entry in generated] == token_ids(outputs)
    assert all(len(entry.top) == 3 and entry.rank == 1 for entry in generated)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("abc", add_special_tokens=True)
    request_id = engine.add_request(prompt + token_ids(outputs), greedy(max_tokens=1, prompt_logprobs=3))
    scored = drain(engine)[request_id, 0][0].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [entry.token_id for entry in scored[1:] if entry] == prompt[1:] + token_ids(outputs)
    again = [entry.logprob for entry in scored[len(prompt) :] if entry]
    assert again == pytest.approx([entry.logprob for entry in generated], rel=1e-4)


def test_prompt_logprobs_survive_chunks_and_cache(checkpoint: Path) -> None:
    prompt = [(7 * index) % 250 for index in range(100)]
    params = greedy(max_tokens=1, prompt_logprobs=0)
    whole = tiny_engine(checkpoint)
    request_id = whole.add_request(prompt, params)
    expected = drain(whole)[request_id, 0][0].prompt_logprobs
    assert expected is not None
    assert len(expected) == 100
    chunked = tiny_engine(checkpoint, max_num_batched_tokens=16, max_num_running=16)
    generate(chunked, prompt, GREEDY)
    request_id = chunked.add_request(prompt, params)
    got = drain(chunked)[request_id, 0][0].prompt_logprobs
    assert got is not None
    assert [entry and entry.token_id for entry in got] == [entry and entry.token_id for entry in expected]
    assert [entry.logprob for entry in got if entry] == pytest.approx([e.logprob for e in expected if e], rel=1e-4)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_abort_frees_everything_and_others_go_on(engine: Engine, steps_before: int) -> None:
    expected = generate(engine, "survivor", GREEDY)
    doomed = engine.add_request(list(range(100)), GREEDY, request_id="doomed")
    survivor = engine.add_request("survivor", GREEDY)
    outputs = [output for _ in range(steps_before) for output in engine.step()]
    last = engine.abort(doomed)
    assert [output.finish_reason for output in last] == [FinishReason.ABORT]
    engine.check()
    outputs += [output for rest in drain(engine).values() for output in rest]
    assert token_ids([output for output in outputs if output.request_id == survivor]) == expected
    assert engine.kv_usage.used == 0
    assert engine.abort(doomed) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        ([NUM_TOKENS], "is not an id"),
        ([-1], "is not an id"),
        ([1.5], "is not an id"),
        ([True], "is not an id"),
        (list(range(256)), "context of 256"),
    ],
)
def test_bad_prompts_are_refused_and_others_served(engine: Engine, prompt: str | list[int], message: str) -> None:
    good = engine.add_request("good", GREEDY)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request(prompt, GREEDY)
    assert len(token_ids(drain(engine)[good, 0])) == 24


def test_max_tokens_beyond_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="exceed the context of 256"):
        engine.add_request(list(range(200)), greedy(max_tokens=57))
    assert not engine.has_work


def test_without_max_tokens_the_context_is_the_limit(engine: Engine) -> None:
    assert len(generate(engine, list(range(200)), greedy(max_tokens=None))) == 56


def test_token_ids_beyond_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="999"):
        engine.add_request("abc", greedy(logit_bias={999: 1.0}))


def test_duplicate_ids_are_refused(engine: Engine) -> None:
    engine.add_request("abc", GREEDY, request_id="same")
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("abc", GREEDY, request_id="same")


def test_full_queue_refuses_all_choices_of_a_request(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, max_num_waiting=3)
    engine.add_request("abc", greedy(n=2))
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        engine.add_request("abc", greedy(n=2))
    assert engine.num_waiting == 2
    drain(engine)
    assert engine.kv_usage.used == 0


def test_banning_everything_ends_that_request_with_an_error(engine: Engine) -> None:
    good = engine.add_request("good", GREEDY)
    bad = engine.add_request("bad", greedy(allowed_token_ids=(5,), bad_words=((5,),)))
    outputs = drain(engine)
    assert outputs[bad, 0][-1].finish_reason is FinishReason.ERROR
    assert isinstance(outputs[bad, 0][-1].stop_reason, str)
    assert len(token_ids(outputs[good, 0])) == 24
