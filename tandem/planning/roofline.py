"""Roofline of a worker, best case and likely case: FLOPs, bytes and the larger of the two times.

Peaks come from the data sheet, `Assumptions` says which share of them is reached; with `IDEAL` every figure is the
floor that physics sets. Source: Williams, Waterman and Patterson, "Roofline" (2009), applied to prefill and decode.
"""

from dataclasses import dataclass

from tandem.architecture.cost import ModelCost
from tandem.planning.hardware import Accelerator, NetworkLink
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed

_NUM_RUNNING_OF_LINE = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Everything that is neither in a data sheet nor in a checkpoint. Replace it by what you measure.

    Args:
        mfu: share of the peak FLOP/s that a prompt's matrix products and attention reach.
        mbu: share of the peak memory bandwidth that a decode step reaches.
        prompt_overhead_ms: of each prompt: scheduling, sampling, the first step's launch.
        step_overhead_ms: of each decode step: scheduling, launches, sampling.
        request_overhead_ms: of each request in a decode step.
        all_reduce_ms: latency of one sum over a worker's accelerators; every layer has two.
        reserve_share: of the memory that neither weights nor KV may have: activations, graphs, fragmentation.
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
    """One prompt's KV on its way: how much, for how long, and the part that prefill does not hide."""

    num_bytes: float
    ms: float
    exposed_ms: float

    @property
    def exposed_share(self) -> float:
        return self.exposed_ms / self.ms if self.ms else 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """One worker: a model on one kind of accelerator, its layers split over `num_accelerators` of one node."""

    model: ModelCost
    hardware: Accelerator
    num_accelerators: int = 1
    assumptions: Assumptions = TYPICAL

    @property
    def flops(self) -> float:
        """Peak of the worker at 16 bits, per second."""
        return self.hardware.flops * self.num_accelerators

    @property
    def bytes_per_s(self) -> float:
        """Peak of the worker's memories."""
        return self.hardware.memory_bytes_per_s * self.num_accelerators

    def attainable_flops(self, intensity: float) -> float:
        """The roof: what work of `intensity` FLOP per byte can reach at best, per second."""
        return min(self.flops, intensity * self.bytes_per_s)

    def prefill_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Two for each token and parameter it is multiplied by, the head once, and attention."""
        return (
            2.0 * self.model.num_prompt_parameters * (num_tokens - num_cached_tokens)
            + 2.0 * self.model.num_table_parameters
            + self.model.attention_flops(num_tokens, num_cached_tokens)
        )

    def prefill_bytes(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Weights read once, cached KV read once, new KV written once; activations stay on the chip."""
        missing = num_tokens - num_cached_tokens
        return self.model.swept_weight_bytes(missing) + self.model.kv_bytes(num_tokens)

    def prefill_ms(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """One prompt alone, from the first chunk to its first token."""
        missing = num_tokens - num_cached_tokens
        products = 2.0 * (self.model.num_prompt_parameters * missing + self.model.num_table_parameters)
        attention = self.model.attention_flops(num_tokens, num_cached_tokens)
        compute_s = (products / self._product_flops + attention / self.flops) / self.assumptions.mfu
        memory_s = self.prefill_bytes(num_tokens, num_cached_tokens) / self._reached_bytes_per_s
        reduce_ms = missing * self._reduce_ms_per_token + self._reduce_latency_ms
        return self.assumptions.prompt_overhead_ms + 1000 * max(compute_s, memory_s) + reduce_ms

    def step_flops(self, num_running: float, context_tokens: float) -> float:
        """Of one decode step of `num_running` requests with `context_tokens` each."""
        attention = self.model.step_attention_flops(context_tokens)
        return num_running * (2.0 * self.model.num_active_parameters + attention)

    def step_bytes(self, num_running: float, context_tokens: float) -> float:
        """Bytes that one decode step reads: the weights once, and every request's KV."""
        return self.model.swept_weight_bytes(num_running) + num_running * self.model.read_bytes(context_tokens)

    def step_ms(self, num_running: float, context_tokens: float) -> float:
        """One decode step; the products by the larger of sweep and compute, attention by its sweep."""
        kv_ms = 1000 * num_running * self.model.read_bytes(context_tokens) / self._reached_bytes_per_s
        overhead_ms = self.assumptions.step_overhead_ms + self._reduce_latency_ms
        return overhead_ms + self._running_ms(num_running) + self._products_ms(num_running) + kv_ms

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights, no window used; 0 when not even the weights fit.

        Windowed layers keep less: `max_running` counts them.
        """
        return max(0, int(self.kv_memory_bytes / self.model.kv_bytes_per_token))

    @property
    def kv_memory_bytes(self) -> float:
        """Memory left for KV; below zero when the weights do not fit."""
        memory = self.hardware.memory_bytes * self.num_accelerators
        return memory * (1 - self.assumptions.reserve_share) - self.model.weight_bytes

    def max_running(self, context_tokens: float) -> int:
        """Requests of that context whose KV fits at once."""
        return max(0, int(self.kv_memory_bytes / self.model.kv_bytes(context_tokens)))

    def max_running_within(self, tpot_ms: float, context_tokens: float) -> int:
        """The largest batch whose step takes no longer than `tpot_ms`; 0 when even one request's takes longer."""
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_ms(middle, context_tokens) <= tpot_ms else (low, middle - 1)
        return low

    def hand_off(
        self, num_tokens: float, num_cached_tokens: float, link: NetworkLink, chunk_tokens: float
    ) -> HandOffEstimate:
        """One prompt's KV over `link` to a worker that holds none of it: each chunk moves while the next is computed.

        Blocks that prefill had cached move from the start. What is left when prefill ends is exposed: the last chunk,
        or more when the link is slower than prefill.
        """
        num_bytes = self.model.kv_bytes(num_tokens)
        ms = link.latency_ms + 1000 * num_bytes / link.usable_bytes_per_s
        last_tokens = min(chunk_tokens, num_tokens - num_cached_tokens)
        last_ms = link.latency_ms + (ms - link.latency_ms) * last_tokens / num_tokens
        hidden_ms = self.prefill_ms(num_tokens, num_cached_tokens)
        if not num_cached_tokens:
            hidden_ms -= self.prefill_ms(last_tokens)
        return HandOffEstimate(num_bytes=num_bytes, ms=ms, exposed_ms=min(ms, max(last_ms, ms - hidden_ms)))

    @property
    def speed(self) -> Speed:
        """The linear model of the same worker, nowhere faster than the roofline up to 256 requests of full windows.

        Prompts: windowed layers cost as if every query saw a whole window. Steps: the chord from 0 to 256 requests of
        the products' time, which bends up where the batch becomes bound by compute.
        """
        return Speed(self._prefill_speed(), self._decode_speed())

    def _prefill_speed(self) -> PrefillSpeed:
        model = self.model
        per_token = 2.0 * model.num_prompt_parameters / self._product_flops + model.window_flops / self.flops
        head = 2.0 * model.num_table_parameters / self._product_flops
        to_ms = 1000 / self.assumptions.mfu
        return PrefillSpeed(
            ms_per_request=self.assumptions.prompt_overhead_ms + self._reduce_latency_ms + head * to_ms,
            ms_per_token=per_token * to_ms + self._reduce_ms_per_token,
            ms_per_pair=model.full_pair_flops / self.flops * to_ms,
        )

    def _decode_speed(self) -> DecodeSpeed:
        model, to_ms = self.model, 1000 / self._reached_bytes_per_s
        sweep_ms = model.step_weight_bytes * to_ms
        chord_ms = max(0.0, self._products_ms(_NUM_RUNNING_OF_LINE) - sweep_ms) / _NUM_RUNNING_OF_LINE
        window_ms = model.window_bytes * to_ms
        return DecodeSpeed(
            ms_per_step=self.assumptions.step_overhead_ms + self._reduce_latency_ms + sweep_ms,
            ms_per_request=self._running_ms(1) + chord_ms + window_ms,
            ms_per_context_token=model.full_bytes_per_token * to_ms,
        )

    @property
    def _product_flops(self) -> float:
        return self.num_accelerators * (
            self.hardware.flops_8bit if self.assumptions.products_8bit else self.hardware.flops
        )

    @property
    def _reached_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.assumptions.mbu

    def _products_ms(self, num_running: float) -> float:
        """Of one step: every weight is read once, and multiplied once for each request."""
        sweep_s = self.model.swept_weight_bytes(num_running) / self._reached_bytes_per_s
        compute_s = 2.0 * num_running * self.model.num_active_parameters / (self._product_flops * self.assumptions.mfu)
        return 1000 * max(sweep_s, compute_s)

    def _running_ms(self, num_running: float) -> float:
        return num_running * (self.assumptions.request_overhead_ms + self._reduce_ms_per_token)

    @property
    def _reduce_latency_ms(self) -> float:
        """Two sums a layer over the worker's accelerators; none on one."""
        return 2 * self.model.num_layers * self.assumptions.all_reduce_ms if self.num_accelerators > 1 else 0.0

    @property
    def _reduce_ms_per_token(self) -> float:
        """Each sum sends and gets `2 (n - 1) / n` times a token's 16-bit hidden state (ring)."""
        n = self.num_accelerators
        num_bytes = 2 * self.model.num_layers * self.model.hidden_size * 2 * 2 * (n - 1) / n
        return 1000 * num_bytes / self.hardware.peer_bytes_per_s


def worker_speed(
    model: ModelCost, hardware: Accelerator, *, num_accelerators: int = 1, assumptions: Assumptions = TYPICAL
) -> Speed:
    """Speed that a planner assumes of such a worker until it has measured one."""
    return Roofline(model, hardware, num_accelerators, assumptions).speed


def kv_tokens(
    model: ModelCost, hardware: Accelerator, *, num_accelerators: int = 1, assumptions: Assumptions = TYPICAL
) -> int:
    """Tokens whose KV fits such a worker; 0 when the weights do not fit."""
    return Roofline(model, hardware, num_accelerators, assumptions).kv_tokens
