"""Sampled tokens follow the filtered distribution, and depend on nothing but their own row."""

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tandem.compute.native.sampling import NativeDraws
from tandem.core.sampling_params import SamplingParams
from tandem.engine.logits import SamplingState
from tandem.engine.sampler import Sampler
from tandem.scheduler.output import SampledToken
from tests.helpers.native_kernels import ARCHITECTURES, load_draws_or_skip

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module", params=["torch", "native"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Sampler with and without the compiled draw, for which all tests hold alike."""
    return Sampler(load_draws_or_skip() if request.param == "native" else None)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def draws(request: pytest.FixtureRequest) -> NativeDraws:
    """The compiled draw, also as it is compiled for lesser processors."""
    return load_draws_or_skip(request.param)


def _state(params: SamplingParams, vocab_size: int, seed: int = 0, outputs: tuple[int, ...] = ()) -> SamplingState:
    return SamplingState(params, seed, (1, 2, 3), outputs, (0,), vocab_size)


def _logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def _kept(row: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The filtered distribution from its definition, in float64, token by token."""
    scaled = (row.double() / params.temperature).softmax(-1).tolist()
    ordered = sorted(enumerate(scaled), key=lambda pair: (-pair[1], pair[0]))
    if params.top_k:
        ordered = ordered[: params.top_k]
    mass = sum(probability for _, probability in ordered)
    prefix: list[tuple[int, float]] = []
    for token_id, probability in ordered:
        if sum(p for _, p in prefix) >= params.top_p * mass:
            break
        prefix.append((token_id, probability))
    kept = [(token_id, p) for token_id, p in prefix if p >= params.min_p * prefix[0][1]]
    total = sum(p for _, p in kept)
    return {token_id: p / total for token_id, p in kept}


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.6},
    {"top_p": 0.95, "min_p": 0.05, "temperature": 2.0},
    {"top_k": 10**6, "top_p": 1.0},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [37, pytest.param(700, marks=pytest.mark.slow)])
def test_draws_follow_the_filtered_distribution(sampler: Sampler, options: dict[str, Any], vocab_size: int) -> None:
    """Chi-square over fixed seeds; tokens expected fewer than five times are pooled."""
    params = SamplingParams(**options)
    row = _logits(1, vocab_size, seed=vocab_size)
    kept = _kept(row[0], params)
    num_draws = 2000
    states = [_state(params, vocab_size, seed) for seed in range(num_draws)]
    drawn = Counter(token.token_id for token in sampler.sample(row.expand(num_draws, -1), states))
    assert set(drawn) <= set(kept)
    expected = {token_id: p * num_draws for token_id, p in kept.items()}
    cells = [(drawn[token_id], count) for token_id, count in expected.items() if count >= 5]
    rare = [(drawn[token_id], count) for token_id, count in expected.items() if count < 5]
    if rare:
        cells.append((sum(seen for seen, _ in rare), sum(count for _, count in rare)))
    chi_square = sum((seen - count) ** 2 / count for seen, count in cells)
    freedom = len(cells) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_top_p_is_exact_however_many_candidates_it_takes(sampler: Sampler, top_p: float, scale: float) -> None:
    vocab_size = 20000
    row = _logits(1, vocab_size, seed=5, scale=scale)
    probabilities, order = row[0].double().softmax(-1).sort(descending=True, stable=True)
    cut = int((probabilities.cumsum(0) - probabilities < top_p - 1e-9).sum())
    allowed = set(order[: cut + 1].tolist())  # one more than the exact cut: float32 weights may round at the boundary
    states = [_state(SamplingParams(top_p=top_p), vocab_size, seed) for seed in range(40)]
    drawn = {token.token_id for token in sampler.sample(row.expand(40, -1), states)}
    assert drawn <= allowed
    assert cut < 3000 or not drawn <= set(order[: cut // 2].tolist())


def test_top_p_includes_the_token_that_crosses(sampler: Sampler) -> None:
    row = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, expected in ((0.4, {0}), (0.6, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
        states = [_state(SamplingParams(top_p=top_p), 3, seed) for seed in range(200)]
        assert {token.token_id for token in sampler.sample(row.expand(200, -1), states)} == expected


def test_top_p_reached_exactly_keeps_no_more(sampler: Sampler) -> None:
    states = [_state(SamplingParams(top_p=0.5), 4, seed) for seed in range(100)]
    assert {token.token_id for token in sampler.sample(torch.zeros(100, 4), states)} == {0, 1}


@pytest.mark.parametrize("min_p", [0.0, 0.5])
def test_top_p_of_next_to_nothing_keeps_the_first_of_the_order(sampler: Sampler, min_p: float) -> None:
    """Tries among all tokens are in vain then."""
    states = [_state(SamplingParams(top_p=0.001, min_p=min_p), 4096, seed) for seed in range(200)]
    assert {token.token_id for token in sampler.sample(torch.zeros(200, 4096), states)} == {0, 1, 2, 3, 4}


def test_roundings_at_the_cut_of_top_p_do_not_change_other_draws(sampler: Sampler) -> None:
    """As kernels of another kind round: many tokens are as good as alike, and some pass each other."""
    vocab_size = 8192
    row = _logits(1, vocab_size, seed=3, scale=0.1)
    other = row + 1e-6 * _logits(1, vocab_size, seed=4, scale=1.0)
    assert not torch.equal(row.argsort(), other.argsort())
    states = [_state(SamplingParams(top_p=0.9), vocab_size, seed) for seed in range(300)]
    chosen = sampler.sample(row.expand(300, -1), states)
    assert sampler.sample(other.expand(300, -1), states) == chosen


def test_top_p_is_computed_after_top_k_is_renormalised(sampler: Sampler) -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    states = [_state(SamplingParams(top_k=2, top_p=0.56), 4, seed) for seed in range(200)]
    assert {token.token_id for token in sampler.sample(row.expand(200, -1), states)} == {0}


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 129, 300, 50257])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_greedy_takes_the_lowest_id_among_equals(sampler: Sampler, vocab_size: int, options: dict[str, Any]) -> None:
    rows = torch.zeros(3, vocab_size)
    rows[1, vocab_size // 2 :] = 1.0
    rows[2, vocab_size - 1] = 1.0
    states = [_state(SamplingParams(**options), vocab_size)] * 3
    tokens = [token.token_id for token in sampler.sample(rows, states)]
    assert tokens == [0, vocab_size // 2, vocab_size - 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy_and_never_fails(sampler: Sampler, temperature: float) -> None:
    rows = _logits(4, 500)
    states = [_state(SamplingParams(temperature=temperature), 500, seed) for seed in range(4)]
    tokens = sampler.sample(rows, states)
    assert [token.token_id for token in tokens] == rows.argmax(-1).tolist()


def _random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 7, 300]),
        top_p=rng.choice([1.0, 0.5, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        logit_bias=rng.choice([{}, {5: 3.0, 9: -100.0}]),
        allowed_token_ids=rng.choice([None, None, tuple(range(0, 900, 3))]),
        bad_words=rng.choice([(), ((4,), (1, 7))]),
        min_tokens=rng.choice([0, 3]),
        logprobs=rng.choice([None, None, 0, 4]),
    )


@pytest.mark.parametrize("vocab_size", [1003, 6145])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_batched_equals_alone_bit_for_bit(sampler: Sampler, vocab_size: int, num_threads: int) -> None:
    rng = random.Random(vocab_size)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for trial in range(12):
            num_rows = rng.choice([2, 5, 16])
            logits = _logits(num_rows, vocab_size, seed=trial)
            greedy = trial % 4 == 0
            params = [SamplingParams(temperature=0) if greedy else _random_params(rng) for _ in range(num_rows)]
            outputs = tuple(rng.choices(range(12), k=trial))
            states = [_state(p, vocab_size, rng.getrandbits(64), outputs) for p in params]
            together = sampler.sample(logits, states)
            for row in range(num_rows):
                assert sampler.sample(logits[row : row + 1].clone(), [states[row]]) == [together[row]]
    finally:
        torch.set_num_threads(before)


def test_the_same_rows_on_the_batched_route_choose_the_same_tokens(sampler: Sampler) -> None:
    """Accelerators compute all rows of a method together; that route must mean the same."""
    rng = random.Random(1)
    logits = _logits(40, 1003)
    states = [_state(_random_params(rng), 1003, seed, (5, 7)) for seed in range(40)]
    alone = sampler.sample(logits, states)
    together = Sampler(rows_together=True).sample(logits, states)
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    for one, other in zip(alone, together, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-5)
            assert [pair[0] for pair in other.logprobs.top] == [pair[0] for pair in one.logprobs.top]


def test_a_stream_continues_elsewhere(sampler: Sampler) -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, repetition_penalty=1.2, n=1)
    rows = _logits(10, 300)
    here = _state(params, 300, seed=99)
    outputs: list[int] = []
    for step in range(10):
        [token] = sampler.sample(rows[step : step + 1], [here])
        here.observe(token.token_id)
        outputs.append(token.token_id)
    for step in range(10):
        there = _state(params, 300, seed=99, outputs=tuple(outputs[:step]))
        assert sampler.sample(rows[step : step + 1], [there])[0].token_id == outputs[step]


def test_seed_and_position_change_the_draw(sampler: Sampler) -> None:
    row = torch.zeros(1, 1000)
    params = SamplingParams()
    by_seed = {sampler.sample(row, [_state(params, 1000, seed)])[0].token_id for seed in range(50)}
    by_position = {
        sampler.sample(row, [_state(params, 1000, outputs=(1,) * length)])[0].token_id for length in range(50)
    }
    assert len(by_seed) > 40
    assert len(by_position) > 40


def test_the_models_logits_are_not_modified(sampler: Sampler) -> None:
    logits = _logits(6, 1003)
    before = logits.clone()
    rng = random.Random(7)
    sampler.sample(logits, [_state(_random_params(rng), 1003, seed) for seed in range(6)])
    assert torch.equal(logits, before)


METHODS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.1},
    {"top_k": 3},
    {"top_p": 0.5},
]


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("rows_together", [False, True])
@pytest.mark.parametrize("bad_value", [NAN, INFINITY])
def test_a_broken_row_fails_alone(options: dict[str, Any], rows_together: bool, bad_value: float) -> None:
    logits = _logits(4, 5000)
    logits[1, 4321] = bad_value
    logits[2, :] = -INFINITY
    params = SamplingParams(**options)
    states = [_state(params, 5000, seed) for seed in range(4)]
    tokens = Sampler(rows_together=rows_together).sample(logits, states)
    assert [token.error is None for token in tokens] == [True, False, False, True]
    assert "not finite" in str(tokens[1].error)
    assert "ban" in str(tokens[2].error)
    assert tokens[1].logprobs is None
    assert tokens[0] == Sampler(rows_together=rows_together).sample(logits[[0, 3]], [states[0], states[3]])[0]


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_request_that_bans_everything_gets_an_error(sampler: Sampler, options: dict[str, Any]) -> None:
    params = SamplingParams(allowed_token_ids=(4,), bad_words=((4,),), **options)
    [token] = sampler.sample(_logits(1, 50), [_state(params, 50)])
    assert token.error is not None
    assert "bad_words" in token.error


def test_no_rows_give_no_tokens(sampler: Sampler) -> None:
    assert sampler.sample(torch.zeros(0, 10), []) == []


@pytest.mark.parametrize("vocab_size", [9, 5000])
def test_logprobs_are_of_the_raw_logits(sampler: Sampler, vocab_size: int) -> None:
    logits = _logits(2, vocab_size)
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, logprobs=5)
    tokens = sampler.sample(logits, [_state(params, vocab_size)] * 2)
    reference = logits.double().log_softmax(-1)
    for row, token in zip(reference, tokens, strict=True):
        assert token.token_id == 3
        assert token.logprobs is not None
        assert token.logprobs.token_id == 3
        assert token.logprobs.logprob == pytest.approx(row[3].item(), abs=1e-5)
        assert token.logprobs.rank == int((row > row[3]).sum()) + 1
        top = row.topk(5)
        assert [token_id for token_id, _ in token.logprobs.top] == top.indices.tolist()
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_of_only_the_chosen_token(sampler: Sampler) -> None:
    [token] = sampler.sample(torch.zeros(1, 4), [_state(SamplingParams(temperature=0.0, logprobs=0), 4)])
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert token.logprobs.rank == 1
    assert token.logprobs.logprob == pytest.approx(-math.log(4))
    assert token == SampledToken(0, token.logprobs)


@pytest.mark.parametrize("rows_together", [False, True])
def test_prompt_logprobs(rows_together: bool) -> None:
    logits = _logits(70, 300)
    token_ids = list(range(70))
    found = Sampler(rows_together=rows_together).prompt_logprobs(logits, token_ids, 2)
    reference = logits.double().log_softmax(-1)
    assert [entry.token_id for entry in found] == token_ids
    for row, entry in zip(reference, found, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-5)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token_id for token_id, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("vocab_size", [1, 127, 129, 1003, 6145, 30011])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 10.0])
def test_the_compiled_draw_chooses_what_pytorch_chooses(draws: NativeDraws, vocab_size: int, scale: float) -> None:
    """Wide and narrow distributions, many ties, banned tokens: another way to the same token."""
    native = Sampler(draws)
    rng = random.Random(vocab_size)
    for trial in range(20):
        logits = _logits(4, vocab_size, seed=trial, scale=scale)
        if trial % 3 == 0:
            logits = (2 * logits).round()
        if trial % 4 == 0 and vocab_size > 1:
            logits[:, :: rng.choice([2, 3])] = -INFINITY
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1e-30, 1e-3, 0.3, 1.0, 2.0, 100.0]),
                top_k=rng.choice([0, 0, 1, 7, 300, 5000]),
                top_p=rng.choice([1.0, 0.01, 0.5, 0.95, 0.9999]),
                min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
            )
            for _ in range(4)
        ]
        states = [_state(each, vocab_size, rng.getrandbits(63)) for each in params]
        assert native.sample(logits, states) == Sampler().sample(logits, states)


@pytest.mark.parametrize("top_k", [50020, 25010, 20000])
@pytest.mark.parametrize("kind", ["distinct", "ties", "flat", "banned"])
def test_the_compiled_draw_keeps_as_many_of_many_tokens_as_pytorch_does(
    draws: NativeDraws, top_k: int, kind: str
) -> None:
    vocab_size = 50021
    native = Sampler(draws)
    rng = random.Random(top_k)
    for trial in range(10):
        logits = _logits(4, vocab_size, seed=trial)
        if kind == "ties":
            logits = logits.round()
        elif kind == "flat":
            logits.zero_()
        elif kind == "banned":
            logits[:, :: rng.choice([2, 3])] = -INFINITY
        params = [
            SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=rng.choice([1.0, 0.3, 0.95, 0.9999]),
                min_p=rng.choice([0.0, 0.0, 1e-9, 0.02]),
            )
            for temperature in (0.001, 0.1, 1.0, 100.0)
        ]
        states = [_state(each, vocab_size, rng.getrandbits(63)) for each in params]
        assert native.sample(logits, states) == Sampler().sample(logits, states)


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize(
    "options", [{"top_k": 600}, {"top_k": 4095}, {"top_k": 600, "top_p": 0.9}, {"min_p": 0.5}], ids=str
)
def test_the_compiled_draw_reaches_both_ends_of_the_order(
    draws: NativeDraws, options: dict[str, Any], position: str
) -> None:
    """All tokens alike: the order is the token id, so the kept ones are the first, and both ends can be drawn."""
    vocab_size = 4096
    num_kept = options.get("top_k", vocab_size) * options.get("top_p", 1.0)
    row = torch.zeros(1, vocab_size)
    uniform = 0.0 if position == "first" else 1.0 - 2.0**-53
    token_ids, peaks = draws.draw([row.data_ptr()], [SamplingParams(**options)], [uniform], vocab_size)
    assert token_ids == [0 if position == "first" else math.ceil(num_kept) - 1]
    assert peaks == [0.0]


def test_rows_may_lie_apart(draws: NativeDraws) -> None:
    """The model's logits need not be contiguous from row to row."""
    native = Sampler(draws)
    wide = _logits(3, 3000)
    states = [_state(SamplingParams(top_p=0.9), 1000, seed) for seed in range(3)]
    assert native.sample(wide[:, 1000:2000], states) == native.sample(wide[:, 1000:2000].contiguous(), states)


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("bad_value", [NAN, INFINITY])
@pytest.mark.parametrize("place", [0, 4321, 4999])
def test_a_broken_row_fails_alone_in_the_compiled_draw(
    draws: NativeDraws, options: dict[str, Any], bad_value: float, place: int
) -> None:
    native = Sampler(draws)
    logits = _logits(4, 5000)
    logits[1, place] = bad_value
    logits[2, :] = -INFINITY
    states = [_state(SamplingParams(**options), 5000, seed) for seed in range(4)]
    tokens = native.sample(logits, states)
    assert [token.error is None for token in tokens] == [True, False, False, True]
    assert "not finite" in str(tokens[1].error)
    assert "ban" in str(tokens[2].error)
    assert native.sample(logits[[0, 3]], [states[0], states[3]]) == [tokens[0], tokens[3]]
