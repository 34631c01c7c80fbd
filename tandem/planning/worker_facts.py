"""Computes what reports of `tandem plan` show of one kind of worker under a workload.

Its capacity, the likely and the best possible time of a long prompt and of a decode step after it, and points of the
roofline picture; all from a `Roofline`.
"""

from dataclasses import dataclass, replace

from tandem.planning.profile import Profile
from tandem.planning.roofline import IDEAL, Roofline
from tandem.planning.sizing import Goals


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Point on the roofline: FLOP per byte, and the FLOP per second likely to be reached."""

    intensity: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Capacity and times of one kind of worker. `*_floor_ms`: lower bounds, with every peak reached and no overhead.

    Args:
        prompt_tokens: prompt length at the objective's percentile; the prompt is computed without cache.
        step_bytes, step_ms: bytes read and time of a decode step of one request at the end of such a prompt.
        ridge: FLOP per byte above which work is compute-bound.
        kv_tokens: tokens whose KV fits `kv_memory_bytes`.
        num_fitting: number of requests with the mean context that fit the KV memory.
        num_within_tpot: number of requests with the mean context whose step meets the TPOT objective.
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
    step_bytes: float
    step_floor_ms: float
    step_ms: float
    mean_context: float
    num_fitting: int
    num_within_tpot: int

    @property
    def kv_bytes_per_s(self) -> float:
        """Rate at which prefill produces KV: a slower link falls behind; a faster one beats recomputing a prefix."""
        return 1000 * self.prompt_kv_bytes / self.prefill_ms

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of the token rate of one request alone."""
        return 1000 / self.step_floor_ms


def worker_facts(roofline: Roofline, profile: Profile, goals: Goals) -> WorkerFacts:
    """Computes the facts of a worker under a workload."""
    model, prompt = roofline.model, profile.prompt_at(goals.share)
    floor = replace(roofline, assumptions=replace(IDEAL, products_8bit=roofline.assumptions.products_8bit))
    return WorkerFacts(
        hardware=roofline.hardware.name,
        num_accelerators=roofline.num_accelerators,
        ridge=roofline.hardware.ridge,
        weight_bytes=roofline.weight_bytes,
        kv_memory_bytes=roofline.kv_memory_bytes,
        kv_tokens=roofline.kv_tokens,
        prompt_tokens=prompt,
        prompt_kv_bytes=model.kv_bytes(prompt),
        prefill_floor_ms=floor.prefill_ms(prompt),
        prefill_ms=roofline.prefill_ms(prompt),
        step_bytes=roofline.step_bytes(1, prompt),
        step_floor_ms=floor.step_ms(1, prompt),
        step_ms=roofline.step_ms(1, prompt),
        mean_context=profile.mean_context,
        num_fitting=roofline.max_running(profile.mean_context),
        num_within_tpot=roofline.max_running_within(goals.tpot_ms, profile.mean_context),
    )


def prefill_point(roofline: Roofline, num_tokens: float, num_cached_tokens: float = 0) -> Point:
    """Point of one prompt on the roofline."""
    flops = roofline.prefill_flops(num_tokens, num_cached_tokens)
    return Point(
        intensity=flops / roofline.prefill_bytes(num_tokens, num_cached_tokens),
        flops=1000 * flops / roofline.prefill_ms(num_tokens, num_cached_tokens),
    )


def decode_point(roofline: Roofline, num_running: float, context_tokens: float) -> Point:
    """Point of one decode step on the roofline."""
    flops = roofline.step_flops(num_running, context_tokens)
    return Point(
        intensity=flops / roofline.step_bytes(num_running, context_tokens),
        flops=1000 * flops / roofline.step_ms(num_running, context_tokens),
    )
