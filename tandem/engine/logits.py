"""Adjusts one request's logits before a token is chosen: penalties, bias, bans and its grammar.

Invariant: a state built from (prompt, outputs) equals one built from the prompt that observed those outputs, so a
request can move to another worker. Work per token does not grow with the length of the history. No random number is
drawn here.
"""

from collections.abc import Sequence

import torch

from tandem.core.sampling_params import SamplingParams
from tandem.engine.constraint import Constraint

_BANNED = float("-inf")


class SamplingState:
    """One request's sampling options and what it has generated so far. On the CPU; owned by the model runner.

    Args:
        vocab_size: width of the logits; every id in `params` lies below it (`validate_for_vocab`).

    `constraint`: its grammar and thinking; where that wants a mask, it has one by the time of `adjust`.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.num_output_tokens = 0
        self._penalties = _Penalties.create(params, prompt_token_ids, vocab_size)
        self._bad_words = _BadWords(params.bad_words, prompt_token_ids) if params.bad_words else None
        self._bias_ids, self._biases = _bias_tensors(params)
        self._allowed_ids = _unique_ids(params.allowed_token_ids) if params.allowed_token_ids else None
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        self._end_ids = _unique_ids(ends)
        self._min_tokens = params.min_tokens if ends else 0
        self.constraint = Constraint.create(params, self._end_ids)
        holders = (self._penalties, self._bias_ids, self._allowed_ids, self._bad_words)
        self._always_adjusts = any(holder is not None for holder in holders)
        for token_id in output_token_ids:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        """Record that `token_id` was chosen as the next output token."""
        self.num_output_tokens += 1
        if self._penalties is not None:
            self._penalties.observe(token_id)
        if self._bad_words is not None:
            self._bad_words.observe(token_id)
        if self.constraint is not None:
            self.constraint.observe(token_id)

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` could change anything for the next token."""
        is_constrained = self.constraint is not None and self.constraint.applies
        return self._always_adjusts or is_constrained or self._ends_are_banned

    @property
    def error(self) -> str | None:
        """Reason why no token can be chosen, as far as it is known before the logits are; None = no reason."""
        return None if self.constraint is None else self.constraint.error

    @property
    def must_end(self) -> bool:
        """Whether the answer is complete, so that only its end may follow."""
        return self.constraint is not None and self.constraint.must_end

    @property
    def _ends_are_banned(self) -> bool:
        return self.num_output_tokens < self._min_tokens

    def adjust(self, row: torch.Tensor) -> None:
        """Apply everything that acts before the temperature, in place. `row`: float32 [vocab_size], any device."""
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias_ids is not None:
            row.index_add_(0, self._bias_ids.to(row.device), self._biases.to(row.device))
        if self._allowed_ids is not None:
            allowed_ids = self._allowed_ids.to(row.device)
            allowed = row[allowed_ids]
            row.fill_(_BANNED)
            row[allowed_ids] = allowed
        if self._bad_words is not None:
            row[self._bad_words.banned_ids().to(row.device)] = _BANNED
        if self._ends_are_banned:
            row[self._end_ids.to(row.device)] = _BANNED
        if self.constraint is not None:
            self.constraint.apply(row)


class _Penalties:
    """Repetition, presence and frequency penalties from counts kept a token at a time.

    One slot for each distinct token seen. Repetition counts prompt and output (Keskar et al. 2019, section 4.1);
    presence and frequency count the output only, as OpenAI defines them.
    """

    def __init__(self, params: SamplingParams, seen_ids: torch.Tensor) -> None:
        self._params = params
        self._num_slots = seen_ids.numel()
        self._token_ids = seen_ids  # [capacity]
        self._counts = torch.zeros(self._num_slots, dtype=torch.float32)  # [capacity], outputs only
        self._slots = {token_id: slot for slot, token_id in enumerate(seen_ids.tolist())}

    @classmethod
    def create(cls, params: SamplingParams, prompt_token_ids: Sequence[int], vocab_size: int) -> "_Penalties | None":
        repeats = params.repetition_penalty != 1.0
        if not repeats and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
            return None
        seen_ids = _unique_ids(prompt_token_ids if repeats else ())
        return cls(params, seen_ids[seen_ids < vocab_size])

    def observe(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._add_slot(token_id)
        self._counts[slot] += 1

    def _add_slot(self, token_id: int) -> int:
        slot = self._num_slots
        if slot == self._token_ids.numel():
            room = max(64, slot)
            self._token_ids = torch.cat([self._token_ids, torch.zeros(room, dtype=torch.int64)])
            self._counts = torch.cat([self._counts, torch.zeros(room, dtype=torch.float32)])
        self._token_ids[slot] = token_id
        self._slots[token_id] = slot
        self._num_slots += 1
        return slot

    def apply(self, row: torch.Tensor) -> None:
        token_ids = self._token_ids[: self._num_slots].to(row.device)
        counts = self._counts[: self._num_slots].to(row.device)
        penalty = self._params.repetition_penalty
        logits = row[token_ids]
        logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits -= self._params.frequency_penalty * counts
        logits -= self._params.presence_penalty * (counts > 0)
        row[token_ids] = logits


class _BadWords:
    """Token sequences that must never be completed, wherever in prompt and output they began."""

    def __init__(self, words: Sequence[Sequence[int]], prompt_token_ids: Sequence[int]) -> None:
        self._always = _unique_ids([word[0] for word in words if len(word) == 1])
        self._by_previous: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_previous.setdefault(word[-2], []).append(tuple(word))
        self._tail_length = max(len(word) for word in words) - 1
        self._tail = list(prompt_token_ids[-self._tail_length :]) if self._tail_length else []

    def observe(self, token_id: int) -> None:
        if self._tail_length:
            self._tail = [*self._tail, token_id][-self._tail_length :]

    def banned_ids(self) -> torch.Tensor:
        words = self._by_previous.get(self._tail[-1], ()) if self._tail else ()
        completing = [word[-1] for word in words if self._tail[1 - len(word) :] == list(word[:-1])]
        return torch.cat([self._always, torch.tensor(completing, dtype=torch.int64)])


def _unique_ids(token_ids: Sequence[int] | None) -> torch.Tensor:
    return torch.tensor(sorted(set(token_ids or ())), dtype=torch.int64)


def _bias_tensors(params: SamplingParams) -> tuple[torch.Tensor | None, torch.Tensor]:
    biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if not params.logit_bias:
        return None, biases
    return torch.tensor(list(params.logit_bias), dtype=torch.int64), biases
