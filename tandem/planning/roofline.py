"""Roofline model of a worker: time as the larger of compute time (FLOPs) and memory time (bytes).

Peaks come from the data sheet, and `Assumptions` gives the shares of them that are reached; with `IDEAL` every figure
is the physical lower bound. Source: Williams, Waterman and Patterson, "Roofline" (2009), applied to prefill and decode.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tandem.architecture.cost import ModelCost
from tandem.architecture.stages import PIECE_TOKENS, num_micro_batches
from tandem.planning.hardware import Accelerator, NetworkLink
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed

_NUM_RUNNING_OF_LINE = 256.0  # requests up to which the linear model holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumed efficiencies and overheads, to be replaced by measured values.

    Args:
        mfu: share of the peak FLOP/s that a prompt's matrix products and attention reach.
        mbu: share of the peak memory bandwidth that a decode step reaches.
        prompt_overhead_ms: per prompt: scheduling, sampling, the first step's launch.
        step_overhead_ms: per decode step: scheduling, launches, sampling.
        request_overhead_ms: per request in a decode step.
        all_reduce_ms: latency of one all-reduce over a worker's accelerators, of which every layer has two, and of one
            transfer between stages.
        reserve_share: share of the memory used neither by weights nor by KV: activations, graphs, fragmentation.
        products_8bit: matrix products run at the 8-bit rate; attention stays at 16 bits.
    """

    mfu: float = 0.55
    mbu: float = 0.75
    prompt_overhead_ms: float = 4.0
    step_overhead_ms: float = 0.8
    request_overhead_ms: float = 0.01
    all_reduce_ms: float = 0.012
    reserve_share: float = 0.1
    products_8bit: bool = False


TYPICAL = Assumptions()
IDEAL = Assumptions(
    mfu=1.0,
    mbu=1.0,
    prompt_overhead_ms=0.0,
    step_overhead_ms=0.0,
    request_overhead_ms=0.0,
    all_reduce_ms=0.0,
    reserve_share=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffEstimate:
    """Transfer of one prompt's KV: size, duration, and the part of the duration not hidden by prefill."""

    num_bytes: float
    ms: float
    exposed_ms: float

    @property
    def exposed_share(self) -> float:
        return self.exposed_ms / self.ms if self.ms else 0.0


class _Passes(NamedTuple):
    """A step in a pipeline: number of micro-batches, and number of times that a stage's time passes until its end.

    One stage after another computes each, and all stages compute at once.
    """

    num_parts: int
    num_passes: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """One worker: a model on one kind of accelerator, its layers split over `num_accelerators` of one node.

    Args:
        drafts: speculative decoding of this worker, or of the decode workers that a prefill worker serves; None = none.
            One of the accelerators holds a draft model or head, whole.
        num_stages: of consecutive layers, each on as many of the accelerators.
        chunk_tokens: the most of a prompt in one step.
    """

    model: ModelCost
    hardware: Accelerator
    num_accelerators: int = 1
    assumptions: Assumptions = TYPICAL
    drafts: PlannedDrafts | None = None
    num_stages: int = 1
    chunk_tokens: int = 2048

    @property
    def width(self) -> int:
        """Accelerators over which each layer is split."""
        return self.num_accelerators // self.num_stages

    @property
    def flops(self) -> float:
        """Peak FLOP/s of the worker at 16 bits."""
        return self.hardware.flops * self.num_accelerators

    @property
    def bytes_per_s(self) -> float:
        """Peak memory bandwidth of the worker."""
        return self.hardware.memory_bytes_per_s * self.num_accelerators

    def attainable_flops(self, intensity: float) -> float:
        """The roof: highest FLOP/s that work of `intensity` FLOP per byte can reach."""
        return min(self.flops, intensity * self.bytes_per_s)

    def prefill_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """FLOPs of one prompt: two per token and parameter, the output head once, and attention. `num_tokens`
        includes cached ones.
        """
        return (
            2.0 * self.model.num_prompt_parameters * (num_tokens - num_cached_tokens)
            + 2.0 * self.model.num_table_parameters
            + self.model.attention_flops(num_tokens, num_cached_tokens)
        )

    def prefill_bytes(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Bytes moved by one prompt: weights and cached KV read once, new KV written once; activations stay on chip."""
        missing = num_tokens - num_cached_tokens
        return self.model.expected_step_weight_bytes(missing) + self.model.kv_bytes(num_tokens)

    def prefill_ms(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Time of one prompt alone, from its first chunk to its first token."""
        missing = num_tokens - num_cached_tokens
        products = 2.0 * (self.model.num_prompt_parameters * missing + self.model.num_table_parameters)
        attention = self.model.attention_flops(num_tokens, num_cached_tokens)
        compute_s = (products / self._product_flops + attention / self.flops) / self.assumptions.mfu
        passes = self._passes(min(missing, self.chunk_tokens))
        memory_s = self.prefill_bytes(num_tokens, num_cached_tokens) / self._reached_bytes_per_s
        if passes.num_parts > 1:  # NOTE: each reads all weights
            num_parts = passes.num_parts * max(1.0, missing / self.chunk_tokens)
            swept = num_parts * self.model.expected_step_weight_bytes(missing / num_parts)
            memory_s = (swept + self.model.kv_bytes(num_tokens)) / self._reached_bytes_per_s
        computed_ms = 1000 * max(compute_s, memory_s) * passes.num_passes / passes.num_parts
        reduce_ms = missing * self._reduce_ms_per_token + self._reduce_latency_ms
        others_ms = reduce_ms + self._stream_ms(missing, passes) + self._head_ms(num_tokens, num_cached_tokens)
        return self.assumptions.prompt_overhead_ms + computed_ms + others_ms

    def step_flops(self, num_running: float, context_tokens: float) -> float:
        """FLOPs of one decode step of `num_running` requests with `context_tokens` each."""
        attention = self.model.step_attention_flops(context_tokens)
        return num_running * (2.0 * self.model.num_active_parameters + attention)

    def step_bytes(self, num_running: float, context_tokens: float) -> float:
        """Bytes that one decode step reads: the weights once, and every request's KV."""
        return self.model.expected_step_weight_bytes(num_running) + num_running * self.model.read_bytes(context_tokens)

    def step_ms(self, num_running: float, context_tokens: float) -> float:
        """Mean milliseconds per output token of a request: the time of a step; with drafts, if shorter, the time of
        drafting and verification over the mean number of accepted tokens.
        """
        plain_ms = self._step_ms(num_running, num_running, context_tokens)
        if self.drafts is None:
            return plain_ms
        guess_ms = self.guess_ms(num_running, context_tokens)
        return min(
            plain_ms,
            *(
                (self._step_ms(num_running, num_running * (1 + num), context_tokens) + num * guess_ms)
                / self.drafts.tokens(num)
                for num in range(1, self.drafts.most + 1)
            ),
        )

    def guess_ms(self, num_running: float, context_tokens: float) -> float:
        """Time of one guess for each request: on one accelerator, by the larger of memory and compute."""
        drafter = None if self.drafts is None else self.drafts.drafter
        if drafter is None:
            return 0.0
        bytes_per_s = self.hardware.memory_bytes_per_s * self.assumptions.mbu
        sweep_s = drafter.expected_step_weight_bytes(num_running) / bytes_per_s
        compute_s = 2.0 * num_running * drafter.num_active_parameters / (self.hardware.flops * self.assumptions.mfu)
        kv_s = num_running * drafter.network.read_bytes(context_tokens) / bytes_per_s
        return self.assumptions.step_overhead_ms + 1000 * (max(sweep_s, compute_s) + kv_s)

    def held_bytes(self, num_tokens: float) -> float:
        """Bytes of KV and other state for a context of this many tokens, the drafter's included."""
        drafted = 0.0 if self.drafts is None else self.drafts.kv_bytes(num_tokens)
        return self.model.kv_bytes(num_tokens) + drafted

    @property
    def weight_bytes(self) -> float:
        """Memory of weights. KV is split evenly, so every accelerator reserves room for the drafter that one holds."""
        drafted = 0.0 if self.drafts is None else self.drafts.weight_bytes
        return self.model.weight_bytes + self.num_accelerators * drafted

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits beside the weights if no layer is windowed; 0 if the weights do not fit, or if
        the model keeps no KV per token.

        `max_running` accounts for windowed layers, which keep less, and for recurrent states.
        """
        num_bytes = self.model.kv_bytes_per_token
        if self.drafts is not None and self.drafts.drafter is not None:
            num_bytes += self.drafts.drafter.network.kv_bytes_per_token
        return max(0, int(self.kv_memory_bytes / num_bytes)) if num_bytes else 0

    @property
    def kv_memory_bytes(self) -> float:
        """Memory left for KV; negative if the weights do not fit."""
        memory = self.hardware.memory_bytes * self.num_accelerators
        return memory * (1 - self.assumptions.reserve_share) - self.weight_bytes

    def max_running(self, context_tokens: float) -> int:
        """Number of requests with that context whose KV fits at once."""
        return max(0, int(self.kv_memory_bytes / self.held_bytes(context_tokens)))

    def max_running_within(self, tpot_ms: float, context_tokens: float) -> int:
        """Largest batch whose step takes at most `tpot_ms`; 0 if a step of one request takes longer."""
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_ms(middle, context_tokens) <= tpot_ms else (low, middle - 1)
        return low

    def hand_off(
        self, num_tokens: float, num_cached_tokens: float, link: NetworkLink, chunk_tokens: float
    ) -> HandOffEstimate:
        """Transfer of one prompt's KV over `link` to a worker that holds none of it, overlapped with prefill by chunks.

        Blocks cached by the prefill worker are sent from the start. The time left when prefill ends is exposed: that of
        the last chunk and of what follows the last token, constant states and a head's rows, or more if the link is
        slower than prefill.
        """
        head_bytes = 0.0 if self.drafts is None else self.drafts.kv_bytes(num_tokens)
        num_bytes = self.model.kv_bytes(num_tokens) + head_bytes
        constant_bytes = self.model.kv_bytes_per_request + head_bytes
        ms = link.latency_ms + 1000 * num_bytes / link.usable_bytes_per_s
        last_tokens = min(chunk_tokens, num_tokens - num_cached_tokens)
        last_bytes = constant_bytes + (num_bytes - constant_bytes) * last_tokens / num_tokens
        last_ms = link.latency_ms + 1000 * last_bytes / link.usable_bytes_per_s
        hidden_ms = self.prefill_ms(num_tokens, num_cached_tokens)
        if not num_cached_tokens:
            hidden_ms -= self.prefill_ms(last_tokens)
        return HandOffEstimate(num_bytes=num_bytes, ms=ms, exposed_ms=min(ms, max(last_ms, ms - hidden_ms)))

    @property
    def speed(self) -> Speed:
        """Linear speed model of a worker of one stage, never faster than the roofline up to 256 requests with full
        windows and without drafts.

        Prompts: windowed layers cost as if every query attended to a full window. Steps: the chord from 0 to 256
        requests of the matrix products' time, which is convex: it grows once the batch is compute-bound. Recurrent
        states cost each token the same.
        """
        return Speed(self._prefill_speed(), self._decode_speed())

    def _head_ms(self, num_tokens: float, num_cached_tokens: float) -> float:
        """Time of a head for its rows of a prompt. Other drafters compute none here."""
        head = None if self.drafts is None else self.drafts.head
        flops = 0.0 if head is None else head.prompt_flops(num_tokens, num_cached_tokens)
        return 1000 * flops / (self.hardware.flops * self.assumptions.mfu)

    def _prefill_speed(self) -> PrefillSpeed:
        model, drafter = self.model, None if self.drafts is None else self.drafts.head
        drafter_pair_flops = 0.0 if drafter is None else drafter.network.full_pair_flops
        attention_flops = model.window_flops + model.token_state_flops
        per_token = 2.0 * model.num_prompt_parameters / self._product_flops + attention_flops / self.flops
        head = 2.0 * model.num_table_parameters / self._product_flops
        to_ms = 1000 / self.assumptions.mfu
        return PrefillSpeed(
            ms_per_request=self.assumptions.prompt_overhead_ms + self._reduce_latency_ms + head * to_ms,
            ms_per_token=per_token * to_ms + self._reduce_ms_per_token + self._head_ms(1, 0),
            ms_per_pair=(model.full_pair_flops / self.flops + drafter_pair_flops / self.hardware.flops) * to_ms,
        )

    def _decode_speed(self) -> DecodeSpeed:
        model, to_ms = self.model, 1000 / self._reached_bytes_per_s
        sweep_ms = model.max_step_weight_bytes * to_ms
        chord_ms = max(0.0, self._products_ms(_NUM_RUNNING_OF_LINE) - sweep_ms) / _NUM_RUNNING_OF_LINE
        bounded_ms = (model.window_bytes + model.token_state_bytes) * to_ms
        return DecodeSpeed(
            ms_per_step=self.assumptions.step_overhead_ms + self._reduce_latency_ms + sweep_ms,
            ms_per_request=self._running_ms(1) + chord_ms + bounded_ms,
            ms_per_context_token=model.full_bytes_per_token * to_ms,
        )

    def _step_ms(self, num_running: float, num_rows: float, context_tokens: float) -> float:
        """Time of one decode step with so many rows: matrix products by the larger of memory and compute, attention by
        memory, which rows of a request read together.
        """
        kv_ms = 1000 * num_running * self.model.read_bytes(context_tokens) / self._reached_bytes_per_s
        passes = self._passes(num_rows)
        overhead_ms = self.assumptions.step_overhead_ms + self._reduce_latency_ms + self._stream_ms(num_rows, passes)
        part_ms = self._products_ms(num_rows / passes.num_parts) + kv_ms / passes.num_parts
        return overhead_ms + self._running_ms(num_rows) + passes.num_passes * part_ms

    def _passes(self, num_tokens: float) -> _Passes:
        """Micro-batches of a step. A piece of a prompt has enough tokens that its products take longer than reading the
        weights.
        """
        bytes_per_s = self._product_flops * self.assumptions.mfu * self.model.weight_bits / 16
        ridge = bytes_per_s / self._reached_bytes_per_s
        num_parts = num_micro_batches(num_tokens, self.num_stages, max(PIECE_TOKENS, math.ceil(ridge)))
        return _Passes(num_parts, num_parts + self.num_stages - 1)

    def _stream_ms(self, num_tokens: float, passes: _Passes) -> float:
        """Time of sending the residual stream from stage to stage, 16 bits a number; a micro-batch is sent once it is
        computed.
        """
        if self.num_stages == 1:
            return 0.0
        num_bytes = 2 * self.model.stream_size * num_tokens / passes.num_parts / self.width
        return passes.num_passes * (self.assumptions.all_reduce_ms + 1000 * num_bytes / self.hardware.peer_bytes_per_s)

    @property
    def _product_flops(self) -> float:
        return self.num_accelerators * (
            self.hardware.flops_8bit if self.assumptions.products_8bit else self.hardware.flops
        )

    @property
    def _reached_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.assumptions.mbu

    def _products_ms(self, num_running: float) -> float:
        """Time of a step's matrix products: every weight is read once, and multiplied once per request."""
        sweep_s = self.model.expected_step_weight_bytes(num_running) / self._reached_bytes_per_s
        compute_s = 2.0 * num_running * self.model.num_active_parameters / (self._product_flops * self.assumptions.mfu)
        return 1000 * max(sweep_s, compute_s)

    def _running_ms(self, num_running: float) -> float:
        return num_running * (self.assumptions.request_overhead_ms + self._reduce_ms_per_token)

    @property
    def _reduce_latency_ms(self) -> float:
        """Latency of two all-reduces per layer over the accelerators that split it; 0 with one accelerator."""
        return 2 * self.model.num_layers * self.assumptions.all_reduce_ms if self.width > 1 else 0.0

    @property
    def _reduce_ms_per_token(self) -> float:
        """Transfer time of a ring all-reduce: `2 (n - 1) / n` times a token's 16-bit hidden state, twice per layer."""
        n = self.width
        num_bytes = 2 * self.model.num_layers * self.model.hidden_size * 2 * 2 * (n - 1) / n
        return 1000 * num_bytes / self.hardware.peer_bytes_per_s


def worker_speed(
    model: ModelCost, hardware: Accelerator, *, num_accelerators: int = 1, assumptions: Assumptions = TYPICAL
) -> Speed:
    """Speed that a planner assumes for such a worker until one has been measured."""
    return Roofline(model, hardware, num_accelerators, assumptions).speed


def kv_tokens(
    model: ModelCost, hardware: Accelerator, *, num_accelerators: int = 1, assumptions: Assumptions = TYPICAL
) -> int:
    """Number of tokens whose KV fits such a worker; 0 if the weights do not fit, or if the model keeps none."""
    return Roofline(model, hardware, num_accelerators, assumptions).kv_tokens
