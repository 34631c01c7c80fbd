import json
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.planner_service.policy import bounds_of, guessed_speeds, policy_of
from tandem.planner_service.targets import Pool
from tandem.planning.observation import PoolState, Traffic
from tests.unit.planner_service.builders import observation
from tests.unit.planner_service.test_settings import settings

P, D = Pool.PREFILL, Pool.DECODE


def test_what_was_asked_for_arrives_at_the_policy() -> None:
    """Too much traffic for anybody: the plan goes as far as the settings allow."""
    asked = settings(
        model="qwen3-8b", prefill_hardware="h100", decode_hardware="h100", max_prefill=3, max_decode=4, hold_s=0
    )
    speeds = guessed_speeds(asked)
    policy = policy_of(asked)
    for second in range(10):
        plan = policy.plan(
            observation(
                now_s=10.0 * second,
                traffic=Traffic(
                    duration_s=10.0,
                    num_requests=2000,
                    num_prompt_tokens=8_000_000,
                    num_finished=2000,
                    num_output_tokens=400_000,
                ),
                prefill=PoolState(num_wanted=1, num_ready=1, speed=speeds[P]),
                decode=PoolState(num_wanted=1, num_ready=1, speed=speeds[D], kv_tokens=400_000),
            )
        )
    assert (plan.num_prefill, plan.num_decode) == (3, 4)
    assert plan.warnings


def test_bounds_are_those_of_the_settings() -> None:
    found = bounds_of(settings(min_decode=2, max_decode=5, decode_accelerators=4, max_accelerators=40, max_step_down=1))
    assert (found.pools[D].least, found.pools[D].most, found.pools[D].num_accelerators) == (2, 5, 4)
    assert (found.pools[P].least, found.pools[P].most) == (1, 8)
    assert (found.max_accelerators, found.max_step_down) == (40, 1)


def test_speeds_are_guessed_for_what_is_named() -> None:
    assert guessed_speeds(settings()) == {}
    found = guessed_speeds(settings(model="qwen3-8b", decode_hardware="h100"))
    assert set(found) == {D}
    faster = guessed_speeds(settings(model="qwen3-8b", decode_hardware="h100", decode_accelerators=2))
    assert faster[D].decode.step_ms(1, 1000) < found[D].decode.step_ms(1, 1000)


def test_a_checkpoints_own_config_tells_its_shape(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (speed,) = guessed_speeds(settings(model=str(tmp_path), prefill_hardware="h100")).values()
    assert speed.prefill.prompt_ms(8000, 0) > 100
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json is no JSON"):
        guessed_speeds(settings(model=str(tmp_path), prefill_hardware="h100"))
    with pytest.raises(ConfigurationError, match="'~nobody-of-that-name' names no user's home directory"):
        guessed_speeds(settings(model="~nobody-of-that-name", prefill_hardware="h100"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config\.json is no object"):
        guessed_speeds(settings(model=str(tmp_path), prefill_hardware="h100"))


def test_an_unknown_model_or_hardware_is_named() -> None:
    for fields in ({"model": "mine", "prefill_hardware": "h100"}, {"model": "qwen3-8b", "prefill_hardware": "abacus"}):
        with pytest.raises(ConfigurationError, match=r"mine|abacus"):
            guessed_speeds(settings(**fields))
