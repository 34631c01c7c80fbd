"""Penalties, bias, allowed tokens and bans against their definitions; incremental state against rebuilt state."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.sampling_params import SamplingParams
from tandem.engine.logits import SamplingState

VOCAB_SIZE = 12
BANNED = -math.inf


def _state(
    prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = (), eos: tuple[int, ...] = (), **options: Any
) -> SamplingState:
    return SamplingState(SamplingParams(**options), 0, prompt, outputs, eos, VOCAB_SIZE)


def _adjusted(state: SamplingState, values: list[float] | None = None) -> list[float]:
    row = torch.tensor(values if values is not None else [1.0] * VOCAB_SIZE)
    state.adjust(row)
    return row.tolist()


def _banned(state: SamplingState) -> set[int]:
    return {token_id for token_id, value in enumerate(_adjusted(state)) if value == BANNED}


def test_a_plain_request_adjusts_nothing() -> None:
    state = _state(prompt=(1, 2), outputs=(3,), eos=(4,))
    assert not state.adjusts
    assert _adjusted(state) == [1.0] * VOCAB_SIZE


def test_repetition_penalty_divides_positive_and_multiplies_negative_over_prompt_and_output() -> None:
    state = _state(prompt=(0, 1, 1), outputs=(2, 2), repetition_penalty=2.0)
    values = [4.0, -4.0, 6.0, 6.0, *[0.5] * 8]
    assert _adjusted(state, values) == [2.0, -8.0, 3.0, 6.0, *[0.5] * 8]


def test_presence_and_frequency_count_outputs_only() -> None:
    state = _state(prompt=(0, 1), outputs=(1, 2, 2), presence_penalty=0.5, frequency_penalty=0.25)
    assert _adjusted(state)[:4] == [1.0, 0.25, 0.0, 1.0]


def test_penalties_act_before_bias_and_bias_before_bans() -> None:
    state = _state(
        outputs=(3,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 5.0, 4: 100.0}, bad_words=((4,),)
    )
    adjusted = _adjusted(state, [4.0] * VOCAB_SIZE)
    assert adjusted[3] == 4.0 / 2.0 - 1.0 + 5.0
    assert adjusted[4] == BANNED


def test_allowed_tokens_ban_all_others() -> None:
    assert _banned(_state(allowed_token_ids=(5, 2, 2))) == set(range(VOCAB_SIZE)) - {2, 5}


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    state = _state(prompt=(7,), bad_words=((1,), (7, 8), (7, 2, 3), (9, 9)))
    assert _banned(state) == {1, 8}
    state.observe(2)
    assert _banned(state) == {1, 3}
    state.observe(9)
    assert _banned(state) == {1, 9}


def test_min_tokens_bans_every_end_until_reached() -> None:
    state = _state(eos=(0, 1), stop_token_ids=(5,), min_tokens=2)
    assert _banned(state) == {0, 1, 5}
    state.observe(3)
    assert _banned(state) == {0, 1, 5}
    state.observe(3)
    assert not state.adjusts
    assert _banned(state) == set()


def test_ignore_eos_leaves_eos_possible_but_not_stop_tokens() -> None:
    assert _banned(_state(eos=(0,), stop_token_ids=(5,), min_tokens=2, ignore_eos=True)) == {5}


def test_prompt_tokens_outside_the_logits_are_not_penalised() -> None:
    assert _adjusted(_state(prompt=(0, VOCAB_SIZE + 3), repetition_penalty=2.0))[0] == 0.5


_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8).map(tuple)


@settings(deadline=None, max_examples=200)
@given(
    prompt=_TOKENS,
    outputs=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=200).map(tuple),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -0.5, 1.5]),
    frequency=st.sampled_from([0.0, 0.125]),
    min_tokens=st.integers(0, 10),
)
def test_observing_equals_rebuilding_and_the_naive_definition(
    prompt: tuple[int, ...],
    outputs: tuple[int, ...],
    words: tuple[tuple[int, ...], ...],
    repetition: float,
    presence: float,
    frequency: float,
    min_tokens: int,
) -> None:
    options: dict[str, Any] = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "bad_words": words,
        "min_tokens": min_tokens,
    }
    observed = _state(prompt=prompt, eos=(11,), **options)
    for token_id in outputs:
        observed.observe(token_id)
    rebuilt = _state(prompt=prompt, outputs=outputs, eos=(11,), **options)
    values = torch.linspace(-3, 3, VOCAB_SIZE).tolist()
    assert _adjusted(observed, values) == _adjusted(rebuilt, values)
    assert _adjusted(observed, values) == pytest.approx(_naive(values, prompt, outputs, observed.params), abs=1e-5)


def _naive(
    values: list[float], prompt: tuple[int, ...], outputs: tuple[int, ...], params: SamplingParams
) -> list[float]:
    history = prompt + outputs
    adjusted = list(values)
    for token_id in range(VOCAB_SIZE):
        if token_id in history:
            factor = params.repetition_penalty
            adjusted[token_id] = adjusted[token_id] / factor if adjusted[token_id] > 0 else adjusted[token_id] * factor
        adjusted[token_id] -= params.presence_penalty * (token_id in outputs)
        adjusted[token_id] -= params.frequency_penalty * outputs.count(token_id)
        for word in params.bad_words:
            if (*history[len(history) - len(word) + 1 :], token_id)[-len(word) :] == word:
                adjusted[token_id] = BANNED
    if len(outputs) < params.min_tokens:
        adjusted[11] = BANNED
    return adjusted
