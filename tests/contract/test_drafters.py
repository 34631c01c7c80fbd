"""Contract of drafters: guesses within limits, of known requests, and nothing of one scope in another."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.artificial import RandomDrafter, ReplayDrafter
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.ngram import NgramDrafter
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.scheduler.output import NewRequest
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.draft_models import tiny_drafter
from tests.helpers.head_drafters import head_drafter
from tests.helpers.heads import save_eagle3

VOCAB_SIZE = 100
PERIOD = [11, 12, 13, 14, 15]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "knowing": lambda: ReplayDrafter({tuple(PERIOD * 3): PERIOD * 3}, VOCAB_SIZE),
    "lying": lambda: ReplayDrafter({tuple(PERIOD * 3): PERIOD * 3}, VOCAB_SIZE, acceptance=0.0),
    "blind": lambda: RandomDrafter(VOCAB_SIZE),
}
FROM_TEXT = ("ngram", "suffix")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("draft"), vocab_size=VOCAB_SIZE, num_hidden_layers=3)


@pytest.fixture(params=[*DRAFTERS, "draft", "head"])
def drafter(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Drafter:
    """NOTE: a head that was shown no states guesses nothing; what it guesses from some has tests of its own."""
    if request.param == "head":
        return head_drafter(checkpoint, f"eagle={save_eagle3(tmp_path / 'head', checkpoint)}")
    return tiny_drafter(checkpoint, VOCAB_SIZE) if request.param == "draft" else DRAFTERS[request.param]()


def new_request(request_id: str, prompt: list[int], output: Sequence[int] = (), root: bytes = b"a") -> NewRequest:
    return NewRequest(request_id, prompt, list(output), SamplingParams(), 0, frozenset(), root)


def test_guesses_are_tokens_within_their_limits(drafter: Drafter) -> None:
    drafter.begin(new_request("r", PERIOD * 3))
    for limit in (1, 2, 7, 1):
        drafter.extend("r", PERIOD[:1])
        drafter.extend("r", PERIOD[1:])
        guess = drafter.draft({"r": limit}).get("r", ())
        assert len(guess) <= limit
        assert all(0 <= token_id < VOCAB_SIZE for token_id in guess)


def test_only_those_asked_for_are_guessed(drafter: Drafter) -> None:
    for request_id in ("r", "s"):
        drafter.begin(new_request(request_id, PERIOD * 3))
    assert set(drafter.draft({"s": 3})) <= {"s"}
    assert drafter.draft({}) == {}


def test_a_request_may_end_and_be_described_again(drafter: Drafter) -> None:
    """As after preemption, with the tokens that it had."""
    drafter.begin(new_request("r", PERIOD * 3))
    drafter.extend("r", PERIOD)
    expected = drafter.draft({"r": 4})
    drafter.end("r")
    drafter.begin(new_request("r", PERIOD * 3, PERIOD))
    again = drafter.draft({"r": 4})
    assert set(again) == set(expected)
    if not isinstance(drafter, RandomDrafter):
        assert again == expected


@pytest.mark.parametrize("prompt", [[], [5], [5, 5]], ids=len)
def test_short_requests_are_no_trouble(drafter: Drafter, prompt: list[int]) -> None:
    drafter.begin(new_request("r", prompt))
    drafter.extend("r", [5])
    assert len(drafter.draft({"r": 2}).get("r", ())) <= 2
    drafter.end("r")


@pytest.mark.parametrize("name", FROM_TEXT)
def test_what_was_read_before_is_copied(name: str) -> None:
    drafter = DRAFTERS[name]()
    drafter.begin(new_request("r", [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4]))
    assert drafter.draft({"r": 3}) == {"r": [5, 6, 7]}


@pytest.mark.parametrize("name", FROM_TEXT)
def test_a_repetition_goes_on_beyond_its_end(name: str) -> None:
    drafter = DRAFTERS[name]()
    drafter.begin(new_request("r", PERIOD * 4))
    guess = drafter.draft({"r": 7})["r"]
    assert guess == (PERIOD * 2)[: len(guess)]
    assert len(guess) == 7


@pytest.mark.parametrize("name", FROM_TEXT)
def test_what_is_new_is_not_guessed(name: str) -> None:
    drafter = DRAFTERS[name]()
    drafter.begin(new_request("r", list(range(1, 50))))
    assert drafter.draft({"r": 3}) == {}


@pytest.mark.parametrize("name", FROM_TEXT)
def test_nothing_of_one_scope_is_guessed_in_another(name: str) -> None:
    """An answer of another tenant must not be told from how fast an answer comes."""
    drafter = DRAFTERS[name]()
    drafter.begin(new_request("r", [1], [21, 22, 23, 24, 25, 26], root=b"a"))
    drafter.draft({"r": 3})
    drafter.end("r")
    drafter.begin(new_request("s", [9, 21, 22], root=b"b"))
    assert drafter.draft({"s": 3}) == {}


def test_knowing_and_lying_are_right_always_and_never() -> None:
    for name, expected in (("knowing", PERIOD), ("lying", [token_id + 1 for token_id in PERIOD])):
        drafter = DRAFTERS[name]()
        drafter.begin(new_request("r", PERIOD * 3))
        assert drafter.draft({"r": 5}) == {"r": expected}
