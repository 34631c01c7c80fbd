"""Builds the planner's policy, bounds and initial worker speeds from its settings."""

import json
from collections.abc import Mapping

from tandem.architecture.catalogue import find_cost
from tandem.architecture.cost import ModelCost, read_cost
from tandem.core.errors import ConfigurationError, shown
from tandem.core.paths import expanded
from tandem.planner_service.actuator import Bounds, PoolBounds
from tandem.planner_service.settings import PlannerSettings
from tandem.planner_service.targets import Pool
from tandem.planning.hardware import find_accelerator
from tandem.planning.observation import ScalingPolicy
from tandem.planning.planner import SloPlanner
from tandem.planning.planner_settings import PlannerConfig
from tandem.planning.roofline import worker_speed
from tandem.routing.speed import Speed


def policy_of(settings: PlannerSettings) -> ScalingPolicy:
    """Creates the scaling policy from the settings."""
    return SloPlanner(
        PlannerConfig(
            ttft_ms=settings.ttft_ms,
            tpot_ms=settings.tpot_ms,
            share=settings.slo_share,
            min_prefill=settings.min_prefill,
            max_prefill=settings.max_prefill,
            min_decode=settings.min_decode,
            max_decode=settings.max_decode,
            prefill_accelerators=settings.prefill_accelerators,
            decode_accelerators=settings.decode_accelerators,
            max_accelerators=settings.max_accelerators,
            hold_s=settings.hold_s,
            warmup_s=settings.warmup_s,
            startup_s=settings.startup_s,
            interval_s=settings.interval_s,
        )
    )


def bounds_of(settings: PlannerSettings) -> Bounds:
    """Limits of what the actuator may apply, from the settings."""
    return Bounds(
        pools={
            Pool.PREFILL: PoolBounds(
                least=settings.min_prefill, most=settings.max_prefill, num_accelerators=settings.prefill_accelerators
            ),
            Pool.DECODE: PoolBounds(
                least=settings.min_decode, most=settings.max_decode, num_accelerators=settings.decode_accelerators
            ),
        },
        max_step_up=settings.max_step_up,
        max_step_down=settings.max_step_down,
        max_accelerators=settings.max_accelerators,
    )


def guessed_speeds(settings: PlannerSettings) -> Mapping[Pool, Speed]:
    """Estimated speed of each pool's workers from their data sheets; omits pools whose hardware is not configured.

    Raises:
        ConfigurationError: the model or the hardware is unknown.
        CheckpointError: config.json does not describe a supported model.
    """
    if settings.model is None:
        return {}
    model = _cost_of(settings.model)
    hardware = {
        Pool.PREFILL: (settings.prefill_hardware, settings.prefill_accelerators),
        Pool.DECODE: (settings.decode_hardware, settings.decode_accelerators),
    }
    return {
        pool: worker_speed(model, find_accelerator(name), num_accelerators=num_accelerators)
        for pool, (name, num_accelerators) in hardware.items()
        if name is not None
    }


def _cost_of(model: str) -> ModelCost:
    path = expanded(model) / "config.json"
    if not path.is_file():
        return find_cost(model)
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"model={shown(model)}: its config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"model={shown(model)}: its config.json is no object")
    return read_cost(config, path.parent.name)
