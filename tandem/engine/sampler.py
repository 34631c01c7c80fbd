"""Samples one token for each row of a step's logits: greedy, or temperature → top-k → top-p → min-p → one draw.

Invariant: a row's token depends on its own logits, options, history, seed and position only; on a CPU every row is
computed by itself, so alone and batched agree bit for bit. For a row that cannot be sampled the result is an error.
The compiled draw (`tandem.compute.native.sampling`), where there is one, chooses as the PyTorch draws here do.

Tokens are in order of descending probability, ties by token id. Top-k keeps exactly k tokens of that order; top-p
(Holtzman et al. 2020) the shortest prefix of what is left whose share is at least p; min-p (Nguyen et al. 2024)
compares with the likeliest. With top-k a draw walks the cumulative distribution in that order, else by token id: top-p
draws from all tokens, up to `_TRIES` times with a new number each, until a token is one that it keeps. So mostly
nothing is sorted, and rounding at the cut matters only to tokens there. If all tries fail, it walks what it keeps in
order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

import torch

from tandem.compute.native.sampling import NativeDraws
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import TokenLogprobs
from tandem.engine.candidates import top_candidates
from tandem.engine.logits import SamplingState
from tandem.engine.randomness import derived_uniform, inverse_cdf, uniform
from tandem.scheduler.output import SampledToken

_SMALLEST_TEMPERATURE = 1e-30  # keeps (logit - peak) / temperature inside float32
_TRIES = 4  # as in the compiled draw
_TOP_P_WIDTHS = (128, 2048, 16384)  # how many candidates are looked at before all of them are
_GREEDY_BLOCK = 128  # logits whose maximum is found together
_ROWS_PER_CHUNK = 64  # on an accelerator: bounds the working memory of prompt logprobs


class _Method(Enum):
    GREEDY = auto()
    BY_TOKEN_ID = auto()
    TOP_K = auto()
    TOP_P = auto()


_Draw = tuple[torch.Tensor, torch.Tensor]  # token_ids int64 [num_rows], largest logits float32 [num_rows]


class Sampler:
    """Chooses tokens. Holds no state of requests: all that a draw depends on comes with its row.

    `draws` serves logits on the CPU; without it PyTorch does. `rows_together` computes all rows of one method as one
    batch, which suits an accelerator; the default does so off the CPU only. The chosen tokens mean the same, but
    rounding may then depend on the batch.
    """

    def __init__(self, draws: NativeDraws | None = None, *, rows_together: bool | None = None) -> None:
        self._draws = draws
        self._rows_together = rows_together

    def _batches(self, logits: torch.Tensor) -> bool:
        return logits.device.type != "cpu" if self._rows_together is None else self._rows_together

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Choose one token a row; the states are read, not advanced (the caller calls `observe`). Raises nothing for a
        row without a finite largest logit: its result has `error` set.

        Args:
            logits: float32 [num_rows, vocab_size], not modified, any device; row i belongs to states[i].
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(states)
        if self._draws is not None and logits.device.type == "cpu":
            return _sample_compiled(self._draws, logits, states)
        chosen: list[SampledToken | None] = [None] * len(states)
        for indices in _chunks(states, self._batches(logits)):
            for index, token in zip(indices, _sample_chunk(logits, states, indices), strict=True):
                chosen[index] = token
        return [token for token in chosen if token is not None]

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Logprobs of known tokens. `logits`: float32 [num_tokens, vocab_size]; row i predicts token_ids[i]."""
        assert logits.shape[0] == len(token_ids)
        step = _ROWS_PER_CHUNK if self._batches(logits) else 1
        found: list[TokenLogprobs] = []
        for start in range(0, len(token_ids), step):
            known = list(token_ids[start : start + step])
            found += _logprobs(logits[start : start + step], known, [num_top] * len(known))
        return found


def _sample_compiled(draws: NativeDraws, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    assert logits.shape[1] == 1 or logits.stride(1) == 1
    base, row_bytes = logits.data_ptr(), logits.stride(0) * logits.element_size()
    rows = [base + index * row_bytes for index in range(len(states))]
    adjusted = {index: logits[index].clone() for index, state in enumerate(states) if state.adjusts}
    for index, row in adjusted.items():
        states[index].adjust(row)
        rows[index] = row.data_ptr()
    uniforms = [0.0 if state.params.is_greedy else uniform(state.seed, state.num_output_tokens) for state in states]
    token_ids, peaks = draws.draw(rows, [state.params for state in states], uniforms, logits.shape[1])
    chosen = [_chosen(token_id, peak, state) for token_id, peak, state in zip(token_ids, peaks, states, strict=True)]
    for index, state in enumerate(states):
        if state.params.logprobs is not None:
            chosen[index : index + 1] = _with_logprobs(logits[index : index + 1], [state], [chosen[index]])
    return chosen


def _chunks(states: Sequence[SamplingState], rows_together: bool) -> Iterator[list[int]]:
    """Row indices to compute together: all rows of one method, or single rows unless all are plain greedy."""
    by_method: dict[_Method, list[int]] = {}
    for index, state in enumerate(states):
        by_method.setdefault(_method(state.params, state.vocab_size), []).append(index)
    for method, indices in by_method.items():
        plain = method is _Method.GREEDY and not any(_asks_more(states[index]) for index in indices)
        if rows_together or (plain and len(indices) == len(states)):
            yield indices
        else:
            yield from ([index] for index in indices)


def _asks_more(state: SamplingState) -> bool:
    return state.adjusts or state.params.logprobs is not None


def _method(params: SamplingParams, vocab_size: int) -> _Method:
    if params.is_greedy:
        return _Method.GREEDY
    if 0 < params.top_k < vocab_size:
        return _Method.TOP_K
    return _Method.TOP_P if params.top_p < 1.0 else _Method.BY_TOKEN_ID


def _sample_chunk(
    logits: torch.Tensor, all_states: Sequence[SamplingState], indices: Sequence[int]
) -> list[SampledToken]:
    """Sample rows that share one method."""
    states = [all_states[index] for index in indices]
    raw = take_rows(logits, indices)
    draw = _DRAWS[_method(states[0].params, states[0].vocab_size)]
    token_ids, peaks = draw(_adjusted(raw, states), states)
    chosen = [
        _chosen(token_id, peak, state)
        for token_id, peak, state in zip(token_ids.tolist(), peaks.tolist(), states, strict=True)
    ]
    return _with_logprobs(raw, states, chosen)


def take_rows(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """The rows `indices` of `logits`, in order; a view if they are all rows or one."""
    if len(indices) == logits.shape[0]:
        return logits
    if len(indices) == 1:
        return logits[indices[0] : indices[0] + 1]
    return logits[torch.tensor(indices, device=logits.device)]


def _adjusted(raw: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """`raw` itself where no row asks for penalties, bias or bans, otherwise an adjusted copy."""
    if not any(state.adjusts for state in states):
        return raw
    rows = raw.clone()
    for row, state in zip(rows, states, strict=True):
        if state.adjusts:
            state.adjust(row)
    return rows


def _chosen(token_id: int, peak: float, state: SamplingState) -> SampledToken:
    if math.isfinite(peak):
        return SampledToken(token_id)
    if peak == -math.inf:
        return SampledToken(token_id, ends=True) if state.must_end else SampledToken(token_id, error=_ban_error(state))
    return SampledToken(token_id, error=_infinite_error(peak))


def _ban_error(state: SamplingState) -> str:
    if state.error is not None:
        return f"no token may be chosen: {state.error}"
    return (
        "no token may be chosen: penalties, logit_bias, allowed_token_ids, bad_words, min_tokens and the grammar "
        "ban them all"
    )


def _infinite_error(peak: float) -> str:
    return f"the model computed logits that are not finite (largest: {peak}); the checkpoint or its dtype is at fault"


def _draw_greedy(rows: torch.Tensor, states: Sequence[SamplingState]) -> _Draw:
    """The largest logit, the lowest id among equals: the first block that reaches it, then the first place in it.

    `rows`: float32 [num_rows, vocab_size]. Two steps, because a reduction to values is much faster than to indices.
    """
    vocab_size = rows.shape[1]
    num_blocks = vocab_size // _GREEDY_BLOCK
    whole = num_blocks * _GREEDY_BLOCK
    maxima = [rows[:, :whole].reshape(-1, num_blocks, _GREEDY_BLOCK).amax(-1)] if num_blocks else []
    if whole < vocab_size:
        maxima.append(rows[:, whole:].amax(-1, keepdim=True))
    first_block = torch.cat(maxima, dim=1).argmax(-1, keepdim=True)  # [num_rows, 1]
    offsets = torch.arange(_GREEDY_BLOCK, device=rows.device)
    positions = (first_block * _GREEDY_BLOCK + offsets).clamp(max=vocab_size - 1)
    values = rows.gather(1, positions)  # [num_rows, _GREEDY_BLOCK]
    best = values.argmax(-1, keepdim=True)
    return positions.gather(1, best).squeeze(1), values.gather(1, best).squeeze(1)


def _draw_by_token_id(rows: torch.Tensor, states: Sequence[SamplingState]) -> _Draw:
    """Temperature and min-p only: no order is needed, so the distribution is walked by token id, without a sort."""
    peaks = rows.amax(-1, keepdim=True)  # [num_rows, 1]
    weights = _weights(rows, peaks, states)  # [num_rows, vocab_size]
    min_ps = [state.params.min_p for state in states]
    if any(min_ps):
        weights = weights * (weights >= _column(rows, min_ps))
    return inverse_cdf(weights, _float64(rows, _uniforms(states))), peaks.squeeze(1)


def _draw_top_k(rows: torch.Tensor, states: Sequence[SamplingState]) -> _Draw:
    """Top-k, then whatever else is set, over the k likeliest tokens only."""
    ks = [state.params.top_k for state in states]
    values, token_ids = top_candidates(rows, max(ks))  # [num_rows, k]
    weights = _weights(values, values[:, :1], states)
    if min(ks) < max(ks):
        weights = weights * (torch.arange(max(ks), device=rows.device) < _column(rows, ks))
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    return _draw_prefix(token_ids, weights, total, states, _uniforms(states)), values[:, 0]


def _draw_top_p(rows: torch.Tensor, states: Sequence[SamplingState]) -> _Draw:
    """Top-p over all tokens, then min-p."""
    peaks = rows.amax(-1, keepdim=True)  # [num_rows, 1]
    weights = _weights(rows, peaks, states)  # [num_rows, vocab_size]
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    numbers = _uniforms(states)
    chosen = torch.zeros_like(peaks, dtype=torch.int64)
    is_accepted = torch.zeros_like(peaks, dtype=torch.bool)
    for _ in range(_TRIES):
        tried = inverse_cdf(weights, _float64(rows, numbers)).unsqueeze(1)
        numbers = [derived_uniform(number) for number in numbers]
        chosen = torch.where(is_accepted, chosen, tried)
        is_accepted |= _is_accepted(rows, weights, total, tried, states)
        if bool(is_accepted.all()):
            return chosen.squeeze(1), peaks.squeeze(1)
    walked = _walk_top_p(rows, total, states, numbers).unsqueeze(1)
    return torch.where(is_accepted, chosen, walked).squeeze(1), peaks.squeeze(1)


def _is_accepted(
    rows: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,
    token_ids: torch.Tensor,
    states: Sequence[SamplingState],
) -> torch.Tensor:
    """Whether one token a row, [num_rows, 1], passes top-p and min-p: what precedes it holds less than p."""
    values = rows.gather(1, token_ids)
    precedes = (rows > values) | ((rows == values) & (torch.arange(rows.shape[1], device=rows.device) < token_ids))
    before = (weights * precedes).sum(-1, keepdim=True, dtype=torch.float64)
    top_ps, min_ps = zip(*((state.params.top_p, state.params.min_p) for state in states), strict=True)
    return (before < total * _column(total, top_ps)) & (weights.gather(1, token_ids) >= _column(weights, min_ps))


def _walk_top_p(
    rows: torch.Tensor, total: torch.Tensor, states: Sequence[SamplingState], numbers: Sequence[float]
) -> torch.Tensor:
    """Token ids [num_rows]: as few of the likeliest as hold the wanted share are put in order and walked."""
    wanted = total * _column(total, [state.params.top_p for state in states])
    vocab_size = rows.shape[1]
    for width in (*(width for width in _TOP_P_WIDTHS if width < vocab_size), vocab_size):
        values, token_ids = top_candidates(rows, width)  # [num_rows, width]
        weights = _weights(values, values[:, :1], states)
        if bool((weights.sum(-1, keepdim=True, dtype=torch.float64) >= wanted).all()):
            break
    return _draw_prefix(token_ids, weights, total, states, numbers)


def _draw_prefix(
    token_ids: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,
    states: Sequence[SamplingState],
    numbers: Sequence[float],
) -> torch.Tensor:
    """Cut ordered candidates by top-p and min-p and draw. [num_rows, num_candidates]; `total` [num_rows, 1]."""
    accumulated = weights.cumsum(-1, dtype=torch.float64)
    before = accumulated - weights
    kept = before < total * _column(total, [state.params.top_p for state in states])
    kept &= weights >= _column(weights, [state.params.min_p for state in states])
    picked = inverse_cdf(weights * kept, _float64(weights, numbers)).unsqueeze(1)
    return token_ids.gather(1, picked).squeeze(1)


def _weights(values: torch.Tensor, peaks: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """Probabilities after the temperature, relative to the likeliest token's: same shape as `values`, in [0, 1]."""
    temperatures = [max(state.params.temperature, _SMALLEST_TEMPERATURE) for state in states]
    return (values - peaks).div_(_column(values, temperatures)).exp_()


def _column(like: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).unsqueeze(1)


def _uniforms(states: Sequence[SamplingState]) -> list[float]:
    return [uniform(state.seed, state.num_output_tokens) for state in states]


def _float64(like: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)


_DRAWS: dict[_Method, Callable[[torch.Tensor, Sequence[SamplingState]], _Draw]] = {
    _Method.GREEDY: _draw_greedy,
    _Method.BY_TOKEN_ID: _draw_by_token_id,
    _Method.TOP_K: _draw_top_k,
    _Method.TOP_P: _draw_top_p,
}


def _with_logprobs(
    raw: torch.Tensor, states: Sequence[SamplingState], chosen: list[SampledToken]
) -> list[SampledToken]:
    """Add the logprobs that rows asked for, from the logits the model computed. `raw`: [num_rows, vocab_size]."""
    asking = [
        (index, state.params.logprobs)
        for index, state in enumerate(states)
        if state.params.logprobs is not None and chosen[index].is_token
    ]
    if not asking:
        return chosen
    indices = [index for index, _ in asking]
    token_ids = [chosen[index].token_id for index in indices]
    found = _logprobs(take_rows(raw, indices), token_ids, [num_top for _, num_top in asking])
    answers = list(chosen)
    for index, logprobs in zip(indices, found, strict=True):
        failed = math.isnan(logprobs.logprob)
        answers[index] = SampledToken(
            logprobs.token_id, None if failed else logprobs, _infinite_error(math.nan) if failed else None
        )
    return answers


def _logprobs(logits: torch.Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of raw logits at `token_ids`, and the likeliest nums_top[i] tokens of row i."""
    normalisers = logits.logsumexp(-1, keepdim=True)  # [num_rows, 1]
    known = logits.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [num_rows, 1]
    ranks = ((logits > known).sum(-1) + 1).tolist()
    values, top_ids = top_candidates(logits, max(nums_top)) if any(nums_top) else (known[:, :0], known[:, :0].long())
    tops = (values - normalisers).tolist()
    own = (known - normalisers).squeeze(1).tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], top[:num], strict=True)))
        for token_id, logprob, rank, ids, top, num in zip(
            token_ids, own, ranks, top_ids.tolist(), tops, nums_top, strict=True
        )
    ]
