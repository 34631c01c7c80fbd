"""A mixture of experts in a real cluster: its stream goes on token-exact when the worker that decodes it dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import ROUTER_FLAGS, logs_shown
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import State, staged
from tests.faults.streams import asked_of
from tests.helpers.checkpoints import save_tiny_qwen3_moe
from tests.helpers.cluster import running_cluster


@pytest.fixture
def experts_scene(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Scene]:
    """One prefill worker and two decode workers."""
    model = save_slow_model(
        tmp_path / "experts",
        save_tiny_qwen3_moe,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        mlp_only_layers=[],
    )
    extra = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS}
    with running_cluster(model, decode=2, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        scene = Scene(cluster)
        scene.heal()
        yield scene


def test_a_stream_of_experts_goes_on_token_exact_on_another_worker(experts_scene: Scene) -> None:
    asked = asked_of(1, 600, 48, temperature=0.8)
    expected = experts_scene.answer_to(asked)
    assert experts_scene.answer_to(asked_of(2, 600, 48, temperature=0.8)) != expected
    with staged(experts_scene, State.DECODING, asked) as target:
        experts_scene.cluster.processes[target.decode].kill()
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, expected)
    record = experts_scene.cluster.get(f"/admin/requests/{target.answer.request_id}")
    assert record["num_failovers"] == 1
