"""Draft models: guesses against the model's own answers, a state that follows the accepted tokens, exact answers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.model_drafter import ModelDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.scheduler.output import NewRequest
from tandem.text.grammar import regex_grammar
from tests.helpers.checkpoints import save_tiny_gemma3, save_tiny_llama
from tests.helpers.draft_models import tiny_drafter
from tests.helpers.engines import drafting_engine, drain, serve_alone, tiny_engine, token_ids
from tests.helpers.handoff import Side, hand_off
from tests.helpers.hybrid_checkpoints import save_tiny_lfm2
from tests.helpers.tokenizers import join_tokens, write_byte_tokenizer

VOCAB_SIZE = 199
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, seed=3, top_p=0.9, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3),
    "grammar": SamplingParams(max_tokens=24, seed=6, grammar=regex_grammar("([a-c]{2}-[0-9]{2} ){3,}")),
}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(6, VOCAB_SIZE) for _ in range(num_tokens)]


PROMPTS = {name: prompt_of(index, 5 + 17 * index) for index, name in enumerate(PARAMS)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(save_tiny_llama(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same tokenizer, and one layer; it reads a window, so blocks are released while a request goes on."""
    path = save_tiny_gemma3(tmp_path_factory.mktemp("small"), seed=7, hidden_size=32)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def plain(served: Path) -> dict[str, list[int]]:
    return serve_alone(served, PROMPTS, PARAMS)


def new_request(prompt: Sequence[int], output: Sequence[int] = (), request_id: str = "r") -> NewRequest:
    return NewRequest(request_id, prompt, list(output), GREEDY, 0, frozenset(), b"a")


def checking_all(drafter: ModelDrafter, num_drafts: int = 4) -> Speculation:
    return Speculation(drafter, num_drafts, adapts=False)


def answers_of(engine: Engine) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, PARAMS[name], request_id=name)
    outputs = drain(engine)
    return {name: token_ids(outputs[name, 0]) for name in PROMPTS}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_model_that_drafts_for_itself_is_always_right(served: Path, params: SamplingParams) -> None:
    """Sampled too: both draw with the numbers of the same seed and position."""
    drafter = tiny_drafter(served, VOCAB_SIZE)
    engine = drafting_engine(served, checking_all(drafter))
    engine.add_request(PROMPTS["sampled"], params, request_id="r")
    answer = token_ids(drain(engine)["r", 0])
    assert answer == serve_alone(served, {"r": PROMPTS["sampled"]}, {"r": params})["r"]
    assert engine.counters.num_accepted == engine.counters.num_drafted > 15


def test_another_model_leaves_the_tokens_as_they_are(served: Path, small: Path, plain: dict[str, list[int]]) -> None:
    """Also while the pool is too small for all, so that some requests get no drafts."""
    for num_blocks in (64, 12):
        drafter = tiny_drafter(small, VOCAB_SIZE, num_blocks=num_blocks)
        engine = drafting_engine(served, checking_all(drafter))
        for _ in range(2):
            assert answers_of(engine) == plain
        assert engine.counters.num_drafted > engine.counters.num_accepted
        engine.step()
        drafter.check()


def test_preempted_requests_begin_again_with_drafts(served: Path, plain: dict[str, list[int]]) -> None:
    drafter = tiny_drafter(served, VOCAB_SIZE)
    engine = drafting_engine(
        served,
        checking_all(drafter),
        block_size=8,
        max_num_batched_tokens=32,
        max_model_len=96,
        kv_cache_bytes=14 * 6144,
    )
    assert answers_of(engine) == plain
    assert engine.counters.num_preemptions > 0
    assert engine.counters.num_accepted > 0


def test_guesses_are_the_models_own_answer_after_right_and_wrong_ones(small: Path) -> None:
    """A state computed for a wrong guess must not remain: what follows is guessed as if it had never been."""
    prompt = prompt_of(1, 40)
    generator = random.Random(0)
    drafter = tiny_drafter(small, VOCAB_SIZE)
    drafter.begin(new_request(prompt))
    tokens: list[int] = []
    assert drafter.draft({"r": 4}) == {}  # 32 of 40 tokens are computed
    for _ in range(12):
        guess = drafter.draft({"r": 4})["r"]
        fresh = tiny_drafter(small, VOCAB_SIZE, max_chunk_tokens=128)
        fresh.begin(new_request(prompt, tokens))
        assert fresh.draft({"r": 4}) == {"r": guess}
        chosen = [*guess[: generator.randrange(5)], generator.randrange(6, VOCAB_SIZE)]
        drafter.extend("r", chosen)
        tokens += chosen
        drafter.check()


def test_a_guess_that_was_not_checked_costs_no_correctness(small: Path) -> None:
    drafter = tiny_drafter(small, VOCAB_SIZE)
    drafter.begin(new_request(prompt_of(1, 10)))
    guess = drafter.draft({"r": 4})["r"]
    assert drafter.draft({"r": 4})["r"] == guess
    drafter.extend("r", guess[:2])
    assert drafter.draft({"r": 2})["r"] == guess[2:]


def test_a_long_prompt_does_not_keep_others_from_their_drafts(small: Path) -> None:
    drafter = tiny_drafter(small, VOCAB_SIZE)
    drafter.begin(new_request(prompt_of(1, 100), request_id="long"))
    drafter.begin(new_request(prompt_of(2, 5), request_id="short"))
    drafted = [set(drafter.draft({"long": 2, "short": 2})) for _ in range(5)]
    assert drafted == [{"short"}] * 3 + [{"short", "long"}] * 2


def test_a_common_prompt_is_computed_once(served: Path) -> None:
    drafter = tiny_drafter(served, VOCAB_SIZE)
    prompt = prompt_of(1, 40)
    drafter.begin(new_request(prompt))
    assert not drafter.draft({"r": 1})
    first = drafter.draft({"r": 1})["r"]
    drafter.begin(new_request(prompt, request_id="again"))
    assert drafter.draft({"again": 1}) == {"again": first}


def test_requests_beyond_its_context_get_no_drafts(served: Path) -> None:
    drafter = tiny_drafter(served, VOCAB_SIZE, max_model_len=16)
    drafter.begin(new_request(prompt_of(1, 13)))
    assert len(drafter.draft({"r": 7})["r"]) == 4  # the last has no position of its own
    drafter.extend("r", [7, 7, 7])
    assert drafter.draft({"r": 7}) == {}


def test_padded_vocabularies_may_differ(served: Path, tmp_path: Path) -> None:
    """Checkpoints of one tokenizer have heads of different widths."""
    narrow = save_tiny_llama(tmp_path / "narrow", vocab_size=150)
    drafter = tiny_drafter(narrow, VOCAB_SIZE)
    drafter.begin(new_request([198, 197, 5]))
    assert max(drafter.draft({"r": 5})["r"]) < 150
    wide = tiny_drafter(served, 20)
    wide.begin(new_request(prompt_of(1, 9)))
    assert max(wide.draft({"r": 7})["r"]) < 20


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_another_worker_began_is_drafted_from_the_prompt_on(
    served: Path, small: Path, params: SamplingParams
) -> None:
    options = {"max_num_batched_tokens": 32, "max_num_running": 16, "block_size": 8, "kv_cache_bytes": 2 << 20}
    source = Side(served, **options)
    destination = Side(served, **options, speculate=f"draft={small}", draft_always=True)
    prompt = PROMPTS["grammar"]
    answer = hand_off(source, destination, prompt, params)
    assert answer == serve_alone(served, {"r": prompt}, {"r": params})["r"]
    assert destination.engine.counters.num_drafted > 0


def test_a_setting_names_the_directory(served: Path, small: Path) -> None:
    engine = tiny_engine(served, speculate=f"draft={small}")
    engine.add_request(PROMPTS["greedy"], GREEDY, request_id="r")
    assert token_ids(drain(engine)["r", 0]) == serve_alone(served, {"r": PROMPTS["greedy"]}, {"r": GREEDY})["r"]
    assert engine.model.drafter == "draft"


def test_one_budget_holds_both_states(served: Path) -> None:
    """A draft model of the same size takes half of it."""
    alone = tiny_engine(served, max_num_running=64).kv_usage.total
    both = tiny_engine(served, max_num_running=64, speculate=f"draft={served}").kv_usage.total
    assert both == alone // 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"speculate": "draft="}, r"speculate='draft=' is no drafter; choose .*draft=DIR"),
    "no directory": ({"speculate": "draft"}, r"speculate='draft' is no drafter; choose .*draft=DIR"),
    "missing": ({"speculate": "draft=/no/such/model"}, "draft model cannot be used: '/no/such/model' is not a direc"),
    "many drafts": ({"num_speculative_tokens": 99}, "num_speculative_tokens=99 must be from 1 to 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_name_no_draft_model_are_refused(served: Path, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message):
        tiny_engine(served, **options)


def test_unusable_draft_models_are_refused_by_name(served: Path, tmp_path: Path) -> None:
    other = write_byte_tokenizer(save_tiny_llama(tmp_path / "other", **SMALL))
    join_tokens(other, ("a", "b"))
    recurrent = write_byte_tokenizer(save_tiny_lfm2(tmp_path / "recurrent"))
    damaged = write_byte_tokenizer(save_tiny_llama(tmp_path / "damaged", **SMALL))
    (damaged / "model.safetensors").unlink()
    for path, message in (
        (
            other,
            r"token '<\|endoftext\|>' is number 257 there and number 256 in the served model",
        ),
        (recurrent, "recurrent state"),
        (damaged, "safetensors"),
    ):
        with pytest.raises(ConfigurationError, match=rf"speculate='draft={path}'.*{message}"):
            tiny_engine(served, speculate=f"draft={path}")


def test_too_little_memory_for_both_is_refused(served: Path) -> None:
    needed = tiny_engine(served, max_num_running=1).kv_usage.total
    with pytest.raises(ConfigurationError, match=r"one request of 256 tokens needs .* of the draft model: raise kv"):
        tiny_engine(served, max_num_running=1, kv_cache_bytes=needed * 1536 * 8, speculate=f"draft={served}")
