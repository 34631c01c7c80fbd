from typing import Any

import pytest

from tandem.core.config import EngineConfig, SchedulerConfig
from tandem.core.errors import ConfigurationError


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "max_num_running", "max_num_waiting", "max_model_len", "aging_steps"]
)
def test_a_scheduler_limit_below_one_is_named(name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigurationError, match=f"{name}=0"):
        SchedulerConfig(**limits)


def test_every_running_decode_must_fit_into_a_step() -> None:
    SchedulerConfig(max_num_batched_tokens=8, max_num_running=8)
    with pytest.raises(ConfigurationError, match="max_num_running=9"):
        SchedulerConfig(max_num_batched_tokens=8, max_num_running=9)


@pytest.mark.parametrize(
    "setting", [{"kv_cache_bytes": 0}, {"num_threads": -1}, {"watermark": 0.5}, {"watermark": -0.1}]
)
def test_an_engine_setting_out_of_range_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))}="):
        EngineConfig("model", **setting)
