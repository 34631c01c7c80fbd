"""Recurrent layers in PyTorch, on any device: one token after the other in decode, a prompt chunk by chunk.

A chunk is computed by products of its tokens with each other and with the state before it, which equals the recurrence
except for rounding. So the last bits of a token depend on how its prompt was divided.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch.nn import functional

from tandem.architecture.state import RecurrentSpec
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.recurrent import RecurrenceInputs, RecurrenceParams, RecurrentBatch, prepare_recurrent
from tandem.compute.step import AttentionBatch

CHUNK = 32  # tokens
_CHUNK_OF_CHANNELS = 8  # NOTE: decays between any two tokens of each column of thousands of heads of one row are many
_MOST_DECAY = 1e4  # NOTE: an infinite one would make 0 * inf of what it multiplies


class ReferenceRecurrentBackend:
    """Implements `RecurrentBackend` for every spec; float32 inside."""

    name = "reference"
    graph_safe = False

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""

    def refuses(self, spec: RecurrentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """None, since it serves every spec; softcaps and sinks do not apply to recurrent states."""
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerRecurrent, layers: Collection[Any]) -> RecurrentBatch:
        return prepare_recurrent(batch, kv)

    def recur(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, state: LayerRecurrent, batch: RecurrentBatch
    ) -> torch.Tensor:
        """See `RecurrentBackend.recur`."""
        assert state.matrices is not None
        terms = _Terms.of(inputs, params)
        before = state.read_matrices(batch.read_pages).masked_fill_(batch.is_first[:, None, None, None], 0.0)
        if batch.max_query_len == 1:
            after, out = terms.step(before)
            state.write_matrices(batch.write_pages, after)
            return out
        out = torch.empty_like(terms.v)
        chunk = CHUNK if terms.v.shape[2] > 1 else _CHUNK_OF_CHANNELS
        begins, first_write = batch.query_start.tolist(), batch.first_write.tolist()
        ends = batch.write_ends.tolist()
        for request, matrices in enumerate(before):
            start, carried = begins[request], matrices
            for write in range(first_write[request], first_write[request + 1]):
                while start < ends[write]:
                    stop = min(start + chunk, ends[write])
                    carried, out[start:stop] = terms.part(start, stop).chunk(carried)
                    start = stop
                state.write_matrices(batch.write_pages[write : write + 1], carried[None])
        return out


class _Terms:
    """Terms of the recurrence for some tokens, float32. `log_decay` [num_tokens, num_heads, 1 or columns]."""

    __slots__ = ("beta", "is_delta", "k", "log_decay", "q", "v")

    def __init__(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, columns]
        k: torch.Tensor,
        v: torch.Tensor,  # [num_tokens, num_heads, rows]
        log_decay: torch.Tensor,
        beta: torch.Tensor,  # [num_tokens, num_heads]
        is_delta: bool,
    ) -> None:
        self.q, self.k, self.v, self.log_decay, self.beta, self.is_delta = q, k, v, log_decay, beta, is_delta

    @classmethod
    def of(cls, inputs: RecurrenceInputs, params: RecurrenceParams) -> "_Terms":
        num_heads = inputs.v.shape[1]
        per_group = num_heads // inputs.q.shape[1]
        step = functional.softplus(inputs.a.float() + params.a_bias)
        wide = step if step.dim() == 3 else step.unsqueeze(2)
        rates = params.a_log.exp()
        log_decay = (-(rates if rates.dim() == 2 else rates[:, None]) * wide).clamp_min(-_MOST_DECAY)
        return cls(
            inputs.q.float().repeat_interleave(per_group, dim=1),
            inputs.k.float().repeat_interleave(per_group, dim=1),
            inputs.v.float(),
            log_decay,
            step if inputs.b is None else inputs.b.float().sigmoid(),
            inputs.b is not None,
        )

    def part(self, start: int, stop: int) -> "_Terms":
        """The terms of tokens `start` to `stop - 1`."""
        at = slice(start, stop)
        return _Terms(self.q[at], self.k[at], self.v[at], self.log_decay[at], self.beta[at], self.is_delta)

    def step(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one token of each request, from its state [num_requests, num_heads, rows, columns]. Returns the
        states after it, and the outputs that queries read.
        """
        after = before * self.log_decay.exp().unsqueeze(2)
        v = self.v
        if self.is_delta:
            v = v - torch.einsum("nhrc,nhc->nhr", after, self.k)
        after += torch.einsum("nhr,nhc->nhrc", v * self.beta.unsqueeze(2), self.k)
        return after, torch.einsum("nhrc,nhc->nhr", after, self.q)

    def chunk(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes tokens of one request, from the state [num_heads, rows, columns] before the first. Returns the state
        after the last, and the outputs that queries read.
        """
        q, k, v, log_decay = (x.transpose(0, 1) for x in (self.q, self.k, self.v, self.log_decay))
        decayed = log_decay.cumsum(1).exp()  # [num_heads, num_tokens, 1 or columns]: from `before` to a token
        decay = _decay(log_decay)
        added = v
        if self.is_delta:
            added = v - torch.einsum("htc,hrc->htr", k * decayed, before)
        added = added * self.beta.T.unsqueeze(2)
        if self.is_delta:
            mutual = _decayed_products(k, k, decay).tril(-1) * self.beta.T.unsqueeze(2)
            eye = torch.eye(mutual.shape[1], device=mutual.device)
            added = torch.linalg.solve_triangular(mutual + eye, added, upper=False, unitriangular=True)
        if len(self.v) > 1 and not added.isfinite().all():  # NOTE: 0 times what a later token adds is NaN then
            return self._one_by_one(before)
        read = torch.einsum("htc,hrc->htr", q * decayed, before) + _decayed_products(q, k, decay).tril() @ added
        after = before * decayed[:, -1:] + torch.einsum("htr,htc->hrc", added, k * decay[:, -1])
        return after, read.transpose(0, 1)

    def _one_by_one(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `chunk`, each token by itself, so that it reads nothing of later ones."""
        read = []
        for token in range(len(self.v)):
            before, out = self.part(token, token + 1).chunk(before)
            read.append(out)
        return before, torch.cat(read)


def _decay(log_decay: torch.Tensor) -> torch.Tensor:
    """Decay from token s to each token t >= s, [num_heads, t, s, 1 or columns], from [num_heads, num_tokens, 1 or
    columns]; 1 above the diagonal. Each is summed separately, since a difference of sums would lose small terms.
    """
    num_tokens = log_decay.shape[1]
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=log_decay.device).tril(-1)
    steps = log_decay.unsqueeze(2) * later[None, :, :, None]
    return steps.cumsum(1).exp()


def _decayed_products(x: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """[num_heads, num_tokens, num_tokens]: product of token t of `x` with token s <= t of `k`, decayed from s to t;
    values above the diagonal are meaningless.
    """
    if decay.shape[3] == 1:
        return (x @ k.transpose(1, 2)) * decay.squeeze(3)
    return torch.einsum("htc,hsc,htsc->hts", x, k, decay)
