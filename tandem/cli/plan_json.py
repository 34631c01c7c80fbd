"""Converts a study, the result of `tandem plan`, to JSON: all figures of its tables and the assumptions behind them.

Infinite figures are null.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandem.architecture.cost import ModelCost
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import Sizing
from tandem.planning.study import Study


def study_as_json(study: Study) -> Mapping[str, Any]:
    """The study as JSON values; times in milliseconds and sizes in bytes, as the field names say."""
    site = study.site
    value = {
        "model": _model(site.prefill.model),
        "workload": {
            "mean_prompt_tokens": site.profile.mean_prompt,
            "mean_output_tokens": site.profile.mean_output,
            "longest_tokens": site.profile.longest,
            "prefix_hit": site.profile.prefix_hit,
        },
        "goals": asdict(site.goals),
        "assumptions": asdict(site.prefill.assumptions),
        "link": asdict(site.link),
        "workers": {"prefill": _worker(site.prefill, study.prefill), "decode": _worker(site.decode, study.decode)},
        "drafts": _drafts(site.decode, site.profile.mean_context, is_at_prefill=site.prefill.drafts is not None),
        "hand_off": asdict(study.hand_off),
        "fits": study.fits,
        "rates": [
            {
                "rate_per_s": choice.apart.rate_per_s,
                "disaggregated": _sizing(choice.apart, study),
                "aggregated": {"hardware": choice.together_roofline.hardware.name, **_sizing(choice.together, study)},
            }
            for choice in study.choices
        ],
    }
    return {name: _finite(one) for name, one in value.items()}


def _model(model: ModelCost) -> dict[str, Any]:
    return {
        "name": model.name,
        "num_parameters": model.num_parameters,
        "num_active_parameters": model.num_active_parameters,
        "expert_bytes": model.expert_bytes,
        "weight_bytes": model.weight_bytes,
        "products": {each.products: each.share for each in model.shares},
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "num_layers": model.num_layers,
        "max_tokens": model.max_tokens,
    }


def _drafts(roofline: Roofline, context_tokens: float, *, is_at_prefill: bool) -> dict[str, Any] | None:
    """Drafts of decode workers; None = they have none.

    `guess_ms`: drafting for one request with the mean context. `at_prefill`: whether prefill workers have the drafter
    too.
    """
    drafts = roofline.drafts
    if drafts is None:
        return None
    drafter = drafts.drafter
    return {
        "drafter": None if drafter is None else drafter.network.name,
        "acceptance": drafts.acceptance,
        "num_speculative_tokens": drafts.most,
        "weight_bytes": drafts.weight_bytes,
        "kv_bytes_per_token": 0.0 if drafter is None else drafter.network.kv_bytes_per_token,
        "guess_ms": roofline.guess_ms(1, context_tokens),
        "at_prefill": is_at_prefill,
    }


def _worker(roofline: Roofline, facts: Any) -> dict[str, Any]:
    return {**asdict(facts), "speed": asdict(roofline.speed), "accelerator": asdict(roofline.hardware)}


def _sizing(sizing: Sizing, study: Study) -> dict[str, Any]:
    profile = study.site.profile
    return {
        **asdict(sizing),
        "num_accelerators": sizing.num_accelerators,
        "usd_per_hour": sizing.usd_per_hour,
        "usd_per_million_output_tokens": sizing.usd_per_million(profile.mean_output),
        "usd_per_million_tokens": sizing.usd_per_million(profile.mean_prompt + profile.mean_output),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
