"""Limits that no number of workers changes: a model that does not fit, a prompt or a step that takes too long.

Each answer is a list of sentences with the figures and the remedy; empty = possible. `who` names the workers in them,
such as "decode workers".
"""

import math
from collections.abc import Sequence

from tandem.planning.prefill_queue import PrefillQueue
from tandem.planning.profile import Profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import Goals


def misfits(roofline: Roofline, profile: Profile, who: str) -> Sequence[str]:
    """Reasons why a worker cannot hold the model or the largest request."""
    model, memory, count = roofline.model, roofline.kv_memory_bytes, roofline.num_accelerators
    if memory <= 0:
        usable = memory + model.weight_bytes
        if usable <= 0:
            drafted = roofline.weight_bytes - model.weight_bytes
            return [
                f"{who} cannot hold the drafter: each accelerator has room for its {drafted / 1e9 / count:.1f} GB, and "
                f"{roofline.hardware.name} has {(usable + drafted) / 1e9 / count:.1f} GB for weights and KV; use "
                "accelerators with more memory, or a smaller drafter"
            ]
        enough = math.floor(count * model.weight_bytes / usable) + 1
        return [
            f"{who} cannot hold {model.name}: the weights take {model.weight_bytes / 1e9:.1f} GB, and "
            f"{_hardware(roofline)} has {usable / 1e9:.1f} GB for weights and KV; use {enough} accelerators a worker "
            "or more, or fewer bits"
        ]
    needed = roofline.held_bytes(profile.longest)
    if needed > memory:
        return [
            f"{who} cannot hold the longest request: {profile.longest:,} tokens need {needed / 1e9:.1f} GB of KV, and "
            f"{_hardware(roofline)} has {memory / 1e9:.1f} GB beside the weights; use more accelerators a worker or "
            "fewer bits"
        ]
    return []


def ttft_problem(queue: PrefillQueue, profile: Profile, goals: Goals, who: str) -> Sequence[str]:
    """Reason why no number of workers meets the TTFT objective: prefill alone takes longer."""
    own_ms = queue.service_at(goals.share)
    if own_ms <= goals.ttft_ms:
        return []
    return [
        f"TTFT {goals.ttft_ms:g} ms cannot be met by any number of {who}: prefill of a prompt of "
        f"{profile.prompt_at(goals.share):,} tokens (p{100 * goals.share:g}) alone takes {own_ms:,.0f} ms; use "
        "more or faster accelerators a worker, shorter prompts or more prefix hits"
    ]


def tpot_problem(
    roofline: Roofline, profile: Profile, goals: Goals, who: str, exposed_ms: float = 0.0
) -> Sequence[str]:
    """Reason why no number of workers meets the TPOT objective: a step of one request takes longer.

    Args:
        exposed_ms: time that the KV hand-off adds to each token.
    """
    step_ms = roofline.step_ms(1, profile.mean_context)
    if step_ms + exposed_ms <= goals.tpot_ms:
        return []
    moved = f", and the hand-off adds {exposed_ms:.1f} ms to each token" if exposed_ms >= 0.1 else ""
    return [
        f"TPOT {goals.tpot_ms:g} ms cannot be met by any number of {who}: a step of a single request takes "
        f"{step_ms:.1f} ms{moved}; use more or faster accelerators a worker, fewer bits"
        + (", or a faster link" if moved else "")
    ]


def _hardware(roofline: Roofline) -> str:
    count = roofline.num_accelerators
    return roofline.hardware.name if count == 1 else f"{count} x {roofline.hardware.name}"
