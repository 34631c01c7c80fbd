"""One kind of worker in figures: what it holds, what prompts and steps take at best and likely. Values for reports."""

from dataclasses import dataclass, replace

from tandem.planning.profile import Profile
from tandem.planning.roofline import IDEAL, Roofline
from tandem.planning.sizing import Goals


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Work on the roofline: FLOP per byte, and FLOP per second that it likely reaches."""

    intensity: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """`floor`: every peak reached and nothing else in the way. Contexts are means, prompts as said.

    Args:
        prompt_tokens: the prompt that the objective's share of requests do not exceed; it is computed uncached.
        swept_bytes, step_ms: of a decode step of one request at the end of such a prompt.
        num_fitting: requests of the mean context that KV has room for.
        num_within_tpot: requests of the mean context whose step meets the objective.
    """

    hardware: str
    num_accelerators: int
    ridge: float
    weight_bytes: float
    kv_memory_bytes: float
    kv_tokens: int
    prompt_tokens: int
    prompt_kv_bytes: float
    prefill_floor_ms: float
    prefill_ms: float
    swept_bytes: float
    step_floor_ms: float
    step_ms: float
    mean_context: float
    num_fitting: int
    num_within_tpot: int

    @property
    def kv_bytes_per_s(self) -> float:
        """KV that prefill makes. A slower link does not keep up; a faster one fetches a prefix sooner than that."""
        return 1000 * self.prompt_kv_bytes / self.prefill_ms

    @property
    def tokens_per_s(self) -> float:
        """Of one request alone, at best."""
        return 1000 / self.step_floor_ms


def worker_facts(roofline: Roofline, profile: Profile, goals: Goals) -> WorkerFacts:
    """Facts of such a worker under that workload."""
    model, prompt = roofline.model, profile.prompt_at(goals.share)
    floor = replace(roofline, assumptions=replace(IDEAL, products_8bit=roofline.assumptions.products_8bit))
    return WorkerFacts(
        hardware=roofline.hardware.name,
        num_accelerators=roofline.num_accelerators,
        ridge=roofline.hardware.ridge,
        weight_bytes=model.weight_bytes,
        kv_memory_bytes=roofline.kv_memory_bytes,
        kv_tokens=roofline.kv_tokens,
        prompt_tokens=prompt,
        prompt_kv_bytes=model.kv_bytes(prompt),
        prefill_floor_ms=floor.prefill_ms(prompt),
        prefill_ms=roofline.prefill_ms(prompt),
        swept_bytes=roofline.step_bytes(1, prompt),
        step_floor_ms=floor.step_ms(1, prompt),
        step_ms=roofline.step_ms(1, prompt),
        mean_context=profile.mean_context,
        num_fitting=roofline.max_running(profile.mean_context),
        num_within_tpot=roofline.max_running_within(goals.tpot_ms, profile.mean_context),
    )


def prefill_point(roofline: Roofline, num_tokens: float, num_cached_tokens: float = 0) -> Point:
    """One prompt on the roofline."""
    flops = roofline.prefill_flops(num_tokens, num_cached_tokens)
    return Point(
        intensity=flops / roofline.prefill_bytes(num_tokens, num_cached_tokens),
        flops=1000 * flops / roofline.prefill_ms(num_tokens, num_cached_tokens),
    )


def decode_point(roofline: Roofline, num_running: float, context_tokens: float) -> Point:
    """One decode step on the roofline."""
    flops = roofline.step_flops(num_running, context_tokens)
    return Point(
        intensity=flops / roofline.step_bytes(num_running, context_tokens),
        flops=1000 * flops / roofline.step_ms(num_running, context_tokens),
    )
