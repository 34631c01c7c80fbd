"""Steps as plain data: an executor that gets a step's bytes and nothing else gives the same answers."""

import pickle
from pathlib import Path

import pytest

from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor import Executor, FinishedStep
from tandem.scheduler.output import SchedulerOutput
from tandem.text.grammar import choice_grammar
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.engines import drain, least_kv_cache_bytes, tiny_engine
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

MAX_MODEL_LEN = 64
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "penalties": SamplingParams(
        seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "scored": SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2, logprobs=2),
    "banned": SamplingParams(seed=5, max_tokens=20, min_tokens=6, bad_words=((7,), (9, 8)), logit_bias={11: 4.0}),
    "choices": SamplingParams(seed=8, n=3, max_tokens=12, ignore_eos=True),
    "held": SamplingParams(seed=9, max_tokens=12, grammar=choice_grammar(["abcab", "bca"])),
}


class _Elsewhere:
    """An `Executor` reached by bytes alone."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[SchedulerOutput] = []

    def submit(self, step: SchedulerOutput) -> FinishedStep:
        self.steps.append(step)
        handle = self._executor.submit(pickle.loads(pickle.dumps(step)))
        return FinishedStep(pickle.loads(pickle.dumps(handle.result())))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1)
    return write_byte_tokenizer(path)


def _engine(checkpoint: Path) -> Engine:
    """One whose blocks last for one of the longest requests, so that some are preempted."""
    room = least_kv_cache_bytes(checkpoint, MAX_MODEL_LEN, 32, "float32")
    return tiny_engine(checkpoint, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=32, kv_cache_bytes=room)


def _serve(engine: Engine) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    for name, params in PARAMS.items():
        engine.add_request(f"a prompt for {name}", params, request_id=name)
    return {key: [_told(output) for output in outputs] for key, outputs in drain(engine).items()}


def _told(output: RequestOutput) -> tuple[object, ...]:
    """All but the times."""
    return output.token_ids, output.text, output.logprobs, output.prompt_logprobs, output.finish_reason


def test_an_executor_that_gets_a_steps_bytes_gives_the_same_answers(checkpoint: Path) -> None:
    expected = _serve(_engine(checkpoint))
    engine = _engine(checkpoint)
    engine._executor = elsewhere = _Elsewhere(engine._executor)
    assert _serve(engine) == expected
    assert engine.counters.num_preemptions > 0, "the pool was meant to be too small"
    described = [request.request_id for step in elsewhere.steps for request in step.new]
    assert len(described) > len(set(described)), "a request that was preempted is described again"


def test_a_decode_step_carries_a_token_a_request_and_blocks_only_when_there_are_more(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    engine._executor = elsewhere = _Elsewhere(engine._executor)
    engine.add_request("a prompt of some length", PARAMS["greedy"])
    drain(engine)
    decodes = elsewhere.steps[1:]
    assert all(not step.new and len(step.scheduled[0].token_ids) == 1 for step in decodes)
    block_size = engine.kv.layout.block_size
    has_more = [step.scheduled[0].blocks is not None for step in decodes]
    assert has_more == [step.scheduled[0].start % block_size == 0 for step in decodes]
