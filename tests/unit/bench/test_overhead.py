"""The engine around a stand-in for the model: what the benchmark times must be steps of the real thing."""

import pytest

from bench.constraints import word_tokenizer
from bench.overhead import (
    BLOCK_SIZE,
    GREEDY,
    LONG,
    NUMS_REQUESTS,
    PHASES,
    SHORT,
    VOCAB_SIZE,
    Bench,
    measure_arrival,
    measure_model,
)
from tandem.core.errors import ConfigurationError
from tandem.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("words")
    word_tokenizer(path, VOCAB_SIZE)
    try:
        bench = Bench(Tokenizer.load(path), 2 * LONG // BLOCK_SIZE)
    except ConfigurationError as error:
        pytest.skip(str(error))
    bench.decoder.logits_of_rows[:2] = 0.0
    return bench


def test_every_part_of_a_step_is_timed(bench: Bench) -> None:
    bench.fill([100, SHORT], GREEDY)
    phases = bench.phases()
    assert len(phases) == len(PHASES)
    assert min(phases) > 0.0
    bench.clear()
    assert not bench.engine.has_work


def test_prompts_arrive_new_and_cached(bench: Bench) -> None:
    rows = measure_arrival(bench, 1)
    lengths = [f"{length} tokens, {state}" for length in (SHORT, LONG) for state in ("new", "cached")]
    assert [row.workload for row in rows] == [length for length in lengths for _ in range(2)]
    assert min(row.value for row in rows) > 0.0


def test_steps_of_a_real_model_are_those_of_all_requests_at_once() -> None:
    steps_s = measure_model("demo/tandem-demo", 2)
    assert tuple(steps_s) == NUMS_REQUESTS
    assert min(steps_s.values()) > 0.0
