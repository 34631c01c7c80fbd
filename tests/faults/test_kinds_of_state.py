"""kill -9 of a worker in every state of a request, for states that are not K and V: what is left goes on token-exact.

Falcon-H1 keeps a recurrent state and K and V in each layer, GLM-5 latents and the keys that tokens are chosen by,
MiniMax-M3 K and V and the keys that blocks are chosen by, Kimi-Linear states with decays of columns beside latents. One
model more keeps K and V, and its answers are drafted.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.conftest import ROUTER_FLAGS, SHORT, logs_shown
from tests.faults.matrix import Matrix
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import State
from tests.faults.streams import Known, asked_of
from tests.faults.test_matrix import DECODE, KILL, NUM_STAGINGS, PREFILL, fault
from tests.helpers.checkpoints import Builder, save_tiny_glm_moe_dsa, save_tiny_qwen3
from tests.helpers.cluster import running_cluster
from tests.helpers.delta_checkpoints import save_tiny_kimi_linear
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1
from tests.helpers.sparse_checkpoints import save_tiny_minimax_m3

MODELS: dict[str, tuple[Builder, dict[str, Any]]] = {
    "side-by-side": (
        save_tiny_falcon_h1,
        {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
    ),
    "sparse-latents": (
        save_tiny_glm_moe_dsa,
        {
            "head_dim": 64,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "kv_lora_rank": 1024,
            "index_topk": 32,
            "index_head_dim": 128,
            "index_n_heads": 4,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared"] * 2,
        },
    ),
    "blocks": (
        save_tiny_minimax_m3,
        {
            "num_hidden_layers": 4,
            "rotary_dim": 64,
            "index_n_heads": 8,
            "index_head_dim": 128,
            "index_block_size": 16,
            "index_topk_blocks": 8,
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
    ),
    "columns-beside-latents": (
        save_tiny_kimi_linear,
        {
            "num_hidden_layers": 4,
            "linear_num_heads": 8,
            "linear_head_dim": 64,
            "kv_lora_rank": 512,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
    ),
}
DRAFTED = "drafted"
MODELS[DRAFTED] = save_tiny_qwen3, {}
NUM_WHOLE = 992  # tokens of the prompt in whole blocks


@pytest.fixture(
    scope="module",
    params=["side-by-side", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "side-by-side")],
)
def kind(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Known]]:
    """Two workers of each role, and what an undisturbed cluster answers."""
    build, options = MODELS[request.param]
    model = save_slow_model(tmp_path_factory.mktemp("models") / request.param, build, **options)
    is_drafted = request.param == DRAFTED
    drafts = ("--speculate", "ngram") if is_drafted else ()
    extra = {"worker": (*WORKER_FLAGS, "--kv-cache-gib", "0.4", *drafts), "router": ROUTER_FLAGS}
    with running_cluster(model, prefill=2, decode=2, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        scene = Scene(cluster)
        scene.heal()
        temperature = 0.0 if is_drafted else 0.8  # NOTE: greedy answers of random weights repeat, as n-grams want it
        asked = asked_of(1, 1000, 48, temperature)
        told = Known(asked, scene.answer_to(asked))
        assert scene.answer_to(asked_of(2, 200, 48, temperature)) != told.token_ids, "it does not heed its prompt"
        yield scene, told


def test_a_stream_goes_on_from_the_last_checkpoint(kind: tuple[Scene, Known]) -> None:
    """The worker that decodes dies: of a prompt that prefill workers had, what follows its last whole block is computed
    again, and what was generated.
    """
    scene, told = kind
    asked = told.asked.salted(scene.new_salt())
    scene.warm_prefill(asked)
    with scene.ask(asked) as answer:
        answer.wait(12)
        victim = scene.pairing(answer)["decode"]
        scene.cluster.processes[victim].kill()
        answer.wait()
        assert (answer.error, answer.token_ids) == (None, told.token_ids)
    record = scene.cluster.get(f"/admin/requests/{answer.request_id}")
    assert record["num_failovers"] == 1
    at_s = next(stage["start_s"] for stage in record["stages"] if stage["name"] == "failover")
    found = [
        int(stage["attributes"]["num_cached_tokens"])
        for stage in record["stages"]
        if stage["name"] == "queue" and stage["start_s"] > at_s
    ]
    assert found
    assert min(found) >= NUM_WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_worker_dies(kind: tuple[Scene, Known], matrix: Matrix, role: str, state: State) -> None:
    scene, told = kind
    for _ in range(NUM_STAGINGS):
        scene.heal()
        row = fault(scene, told, SHORT, role, state, KILL)
        if row is not None:
            matrix.append(row)
            return
    raise AssertionError(f"the transfer was over before the signal, {NUM_STAGINGS} times")
