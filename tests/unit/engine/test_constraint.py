"""A constraint's bans at every point of an answer, and what stays the same when another worker takes it over."""

from collections.abc import Iterator

import pytest
import torch

from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.engine.constraint import constraints_of
from tandem.engine.logits import SamplingState
from tandem.engine.masks import MaskMaker
from tandem.engine.sampler import Sampler
from tandem.text.grammar import choice_grammar, regex_grammar
from tandem.text.grammars import Grammars
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

VOCAB_SIZE = NUM_TOKENS + 37  # logits are wider than the tokenizer
EOS = NUM_TOKENS - 1
START, END = (NUM_TOKENS - 2, 5), (6, 7)
BANNED = float("-inf")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def masks(tokenizer: Tokenizer) -> Iterator[MaskMaker]:
    grammars = Grammars(tokenizer, VOCAB_SIZE, (EOS,))
    maker = MaskMaker(grammars, VOCAB_SIZE, torch.device("cpu"))
    yield maker
    maker.close()
    grammars.close()


def _state(params: SamplingParams, outputs: tuple[int, ...] = (), eos: tuple[int, ...] = (EOS,)) -> SamplingState:
    return SamplingState(params, 0, (1, 2), outputs, eos, VOCAB_SIZE)


def _row(masks: MaskMaker, state: SamplingState) -> torch.Tensor:
    masks.start(constraints_of([state.constraint]))
    masks.finish()
    row = torch.ones(VOCAB_SIZE)
    if state.adjusts:
        state.adjust(row)
    return row


def _allowed(masks: MaskMaker, state: SamplingState) -> set[int]:
    return {token_id for token_id, value in enumerate(_row(masks, state).tolist()) if value != BANNED}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def test_only_the_grammars_tokens_and_at_its_end_only_ends(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a, b, c = _ids(tokenizer, "abc")
    state = _state(SamplingParams(grammar=regex_grammar("ab?c"), stop_token_ids=(NUM_TOKENS - 3,)))
    assert _allowed(masks, state) == {a}
    state.observe(a)
    assert _allowed(masks, state) == {b, c}
    assert not state.must_end
    state.observe(c)
    assert _allowed(masks, state) == {EOS, NUM_TOKENS - 3}
    assert state.must_end


def test_an_answer_that_may_go_on_may_also_end(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a = _ids(tokenizer, "a")[0]
    state = _state(SamplingParams(grammar=regex_grammar("a*")), (a, a))
    assert _allowed(masks, state) == {a, EOS}
    assert not state.must_end


def test_a_mask_keeps_what_else_adjusts(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a, b, c = _ids(tokenizer, "abc")
    params = SamplingParams(
        grammar=regex_grammar("[abc]+"), allowed_token_ids=(a, b, EOS), bad_words=((b,),), logit_bias={a: 2.0, c: 50.0}
    )
    row = _row(masks, _state(params, (a,)))
    assert row[a] == 3.0
    assert {token_id for token_id, value in enumerate(row.tolist()) if value != BANNED} == {a, EOS}


def test_a_row_without_any_token_left_fails_alone(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a, b = _ids(tokenizer, "ab")
    states = [
        _state(SamplingParams(grammar=regex_grammar("a"), allowed_token_ids=(b,), temperature=temperature))
        for temperature in (0.0, 1.0)
    ]
    states.append(_state(SamplingParams(grammar=regex_grammar("a"))))
    masks.start(constraints_of([state.constraint for state in states]))
    masks.finish()
    tokens = Sampler().sample(torch.ones(3, VOCAB_SIZE), states)
    assert [token.error is None for token in tokens] == [False, False, True]
    assert "grammar" in str(tokens[0].error)
    assert tokens[2].token_id == a


def test_a_complete_answer_of_a_model_without_ends_ends_without_a_token(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a = _ids(tokenizer, "a")[0]
    states = [
        _state(SamplingParams(grammar=regex_grammar("a"), logprobs=1), (a,), eos=()),
        _state(SamplingParams(grammar=regex_grammar("a"), allowed_token_ids=(a,)), (a,)),
    ]
    masks.start(constraints_of([state.constraint for state in states]))
    masks.finish()
    for token in Sampler().sample(torch.ones(2, VOCAB_SIZE), states):
        assert (token.ends, token.error, token.logprobs) == (True, None, None)


def test_an_answer_that_never_matched_says_so(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    state = _state(SamplingParams(grammar=regex_grammar("a+")), tuple(_ids(tokenizer, "ab")))
    masks.start(constraints_of([state.constraint]))
    masks.finish()
    (token,) = Sampler().sample(torch.ones(1, VOCAB_SIZE), [state])
    assert "does not match its grammar" in str(token.error)


def test_the_budget_forces_the_marker_whatever_is_banned(masks: MaskMaker) -> None:
    reasoning = Reasoning((), END, is_open=True, max_tokens=2)
    state = _state(SamplingParams(reasoning=reasoning, bad_words=((END[0],),), allowed_token_ids=(50,)))
    assert _allowed(masks, state) == {50}
    for thought in (50, 51):
        state.observe(thought)
    for marker in END:
        assert _allowed(masks, state) == {marker}
        state.observe(marker)
    assert _allowed(masks, state) == {50}


def test_thinking_comes_before_the_grammar_and_cannot_end_the_answer(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a = _ids(tokenizer, "a")[0]
    state = _state(SamplingParams(grammar=regex_grammar("a"), reasoning=Reasoning((), END, is_open=True)))
    assert _allowed(masks, state) == set(range(VOCAB_SIZE)) - {EOS}
    for token_id in (70, *END):
        state.observe(token_id)
    assert _allowed(masks, state) == {a}
    plain = _state(SamplingParams(reasoning=Reasoning((), END, is_open=True)))
    assert not plain.adjusts


def test_an_answer_may_begin_with_thinking_or_with_itself(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a, b = _ids(tokenizer, "ab")
    params = SamplingParams(grammar=regex_grammar("ab"), reasoning=Reasoning(START, END))
    state = _state(params)
    assert _allowed(masks, state) == {a, START[0]}
    state.observe(a)
    assert _allowed(masks, state) == {b}
    thinking = _state(params, (START[0],))
    assert _allowed(masks, thinking) == {START[1]}
    thinking.observe(START[1])
    assert EOS not in _allowed(masks, thinking)
    for token_id in (80, *END):
        thinking.observe(token_id)
    assert _allowed(masks, thinking) == {a}


def test_a_marker_that_is_also_text_of_the_grammar_may_break_off(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    a, b, c = _ids(tokenizer, "abc")
    params = SamplingParams(grammar=choice_grammar(["ac"]), reasoning=Reasoning((a, b), END))
    state = _state(params)
    assert _allowed(masks, state) == {a}
    state.observe(a)
    assert _allowed(masks, state) == {b, c}
    answered, thought = _state(params, (a, c)), _state(params, (a, b, *END))
    assert _allowed(masks, answered) == {EOS}
    assert _allowed(masks, thought) == {a}


@pytest.mark.parametrize("reasoning", [None, Reasoning(START, END, max_tokens=3)], ids=["plain", "thinking"])
def test_a_state_built_anywhere_equals_the_one_that_observed(
    masks: MaskMaker, tokenizer: Tokenizer, reasoning: Reasoning | None
) -> None:
    params = SamplingParams(grammar=regex_grammar("[a-c]{2,4}x*"), reasoning=reasoning)
    thinking = () if reasoning is None else (*START, 60, END[0], 61, *END)
    answer = (*thinking, *_ids(tokenizer, "abcxx"))
    observed = _state(params)
    for num_tokens in range(len(answer) + 1):
        assert torch.equal(_row(masks, observed), _row(masks, _state(params, answer[:num_tokens])))
        if num_tokens < len(answer):
            observed.observe(answer[num_tokens])


def test_masks_are_made_beside_the_caller_and_in_any_number(masks: MaskMaker, tokenizer: Tokenizer) -> None:
    letters = _ids(tokenizer, "abcdefgh")
    states = [_state(SamplingParams(grammar=regex_grammar(letter))) for letter in "abcdefgh"]
    together = [_allowed_of(masks, states, index) for index in range(len(states))]
    assert together == [{letter} for letter in letters]


def _allowed_of(masks: MaskMaker, states: list[SamplingState], index: int) -> set[int]:
    """NOTE: the first call makes all masks at once, later ones find them made."""
    masks.start(constraints_of([state.constraint for state in states]))
    masks.finish()
    row = torch.ones(VOCAB_SIZE)
    states[index].adjust(row)
    return {token_id for token_id, value in enumerate(row.tolist()) if value != BANNED}
