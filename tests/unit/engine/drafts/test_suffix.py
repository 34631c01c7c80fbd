"""Suffix drafter: recent answers of the scope, and how much is guessed."""

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts import suffix
from tandem.engine.drafts.suffix import SuffixDrafter
from tandem.scheduler.output import NewRequest


def new_request(request_id: str, prompt: list[int], output: list[int], root: bytes = b"a") -> NewRequest:
    return NewRequest(request_id, prompt, output, SamplingParams(), 0, frozenset(), root)


def answered(drafter: SuffixDrafter, output: list[int], root: bytes = b"a") -> None:
    drafter.begin(new_request("old", [1], output, root))
    drafter.end("old")


def test_recent_answers_of_the_scope_are_read() -> None:
    drafter = SuffixDrafter()
    answered(drafter, [21, 22, 23, 24, 25, 26])
    drafter.begin(new_request("r", [9], [21, 22]))
    assert drafter.draft({"r": 3}) == {"r": [23, 24, 25]}


def test_a_guess_never_runs_from_one_answer_into_the_next() -> None:
    drafter = SuffixDrafter()
    answered(drafter, [21, 22, 23])
    answered(drafter, [31, 32, 33])
    drafter.begin(new_request("r", [9], [21, 22]))
    assert drafter.draft({"r": 5}) == {"r": [23]}


def test_the_likeliest_continuation_wins() -> None:
    drafter = SuffixDrafter()
    for token_id in (40, 41, 40):
        answered(drafter, [21, 22, token_id, 50 + token_id])
    drafter.begin(new_request("r", [9], [21, 22]))
    assert drafter.draft({"r": 2}) == {"r": [40, 90]}


def test_what_is_as_likely_as_much_else_is_not_guessed() -> None:
    drafter = SuffixDrafter()
    for token_id in range(40, 44):
        answered(drafter, [21, 22, token_id])
    drafter.begin(new_request("r", [9], [21, 22]))
    assert drafter.draft({"r": 1}) == {}


def test_old_answers_and_scopes_are_forgotten() -> None:
    drafter = SuffixDrafter()
    answered(drafter, [21, 22, 23])
    for index in range(suffix.MAX_SCOPES):
        answered(drafter, [31, 32, 33], root=index.to_bytes(4, "little"))
    drafter.begin(new_request("r", [9], [21, 22]))
    assert drafter.draft({"r": 1}) == {}
    answered(drafter, [21, 22, 23])
    answered(drafter, list(range(1000, 1000 + suffix.MAX_SCOPE_TOKENS)))
    assert drafter.draft({"r": 1}) == {}
