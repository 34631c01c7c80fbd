"""kill -9 of a worker and clients that leave, in every state of a request, for states that are not K and V.

DeepSeek-V3 keeps latents, Mamba-2 recurrent states alone, Granite 4 either those or K and V, Falcon-H1 both in each
layer, Kimi-Linear states with decays of columns beside latents, Qwen3-Next states of the gated delta rule, Jamba those
of a selective scan, GLM-5 latents and the keys that tokens are chosen by, MiniMax-M3 K and V and the keys that blocks
are chosen by. Two workers of each role, and one: over NIXL and over TCP. Two more models keep K and V; their answers
are drafted, by the model itself and by a head.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.conftest import GATEWAY_FLAGS, ROUTER_FLAGS, SHORT, logs_shown
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import REPORT_S, WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import State, staged
from tests.faults.streams import PATIENCE_S, Known, asked_of
from tests.faults.test_aborts import FREE_S, Moment, leave
from tests.faults.test_alone import FREE_S as FREE_OF_LEASES_S
from tests.faults.test_alone import MAX_WAIT_S, fresh_answer
from tests.faults.test_matrix import DECODE, KILL, NUM_STAGINGS, PREFILL, fault
from tests.helpers.checkpoints import (
    Builder,
    save_tiny_deepseek_v3,
    save_tiny_deepseek_v4,
    save_tiny_glm_moe_dsa,
    save_tiny_qwen3,
)
from tests.helpers.cluster import running_cluster
from tests.helpers.delta_checkpoints import save_tiny_kimi_linear, save_tiny_qwen3_next
from tests.helpers.heads import save_llama_with_eagle3
from tests.helpers.hybrid_checkpoints import (
    save_tiny_falcon_h1,
    save_tiny_granite_hybrid,
    save_tiny_jamba,
    save_tiny_mamba2,
)
from tests.helpers.serving_clients import num_drafted
from tests.helpers.sparse_checkpoints import save_tiny_minimax_m3

LATENT: dict[str, Any] = {
    "head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 1024,
    "num_hidden_layers": 4,
}
MODELS: dict[str, tuple[Builder, dict[str, Any]]] = {
    "latents": (save_tiny_deepseek_v3, LATENT),
    "recurrences": (save_tiny_mamba2, {"num_heads": 12, "head_dim": 64, "state_size": 64, "num_hidden_layers": 4}),
    "some-layers": (
        save_tiny_granite_hybrid,
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mamba_n_heads": 12,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
        },
    ),
    "side-by-side": (
        save_tiny_falcon_h1,
        {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
    ),
    "sparse-latents": (
        save_tiny_glm_moe_dsa,
        LATENT
        | {
            "index_topk": 32,
            "index_head_dim": 128,
            "index_n_heads": 4,
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
    "entries": (
        save_tiny_deepseek_v4,
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "index_head_dim": 128,
            "sliding_window": 64,
            "index_topk": 64,
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
    "deltas": (
        save_tiny_qwen3_next,
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "scans": (
        save_tiny_jamba,
        {"num_hidden_layers": 4, "attn_layer_period": 2, "mamba_d_state": 256, "mamba_dt_rank": 24},
    ),
}
DRAFTED, DRAFTED_BY_HEAD = "drafted", "drafted-by-a-head"
NUM_WHOLE = 992  # tokens of the prompt in whole blocks


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, how many workers of each role serve it, and what moves its blocks."""

    kind: str
    num_workers: int
    transport: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.num_workers}p{self.num_workers}d-{self.transport}"


SETUPS = [Setup(kind, number, transport) for number in (2, 1) for transport in ("tcp", "nixl") for kind in MODELS]
MODELS |= {DRAFTED: (save_tiny_qwen3, {}), DRAFTED_BY_HEAD: (save_llama_with_eagle3, {})}
SETUPS += [Setup(DRAFTED, 2, "tcp"), Setup(DRAFTED_BY_HEAD, 2, "tcp")]
QUICK = Setup("side-by-side", 2, "tcp")
QUICK_KILLS = ((PREFILL, State.COMPUTING), (DECODE, State.DECODING))


def params(setup: Setup, *others: Any) -> Any:
    """Of a test; slow but for one cluster, and two kills in it."""
    marks = () if setup == QUICK and (not others or others in QUICK_KILLS) else pytest.mark.slow
    return pytest.param(setup, *others, marks=marks, id="-".join(map(str, (setup, *others))))


def states_of(setup: Setup) -> list[State]:
    """NOTE: a recurrence leases one block when its prompt is computed: nothing shows that it is between two chunks."""
    return [state for state in State if state is not State.COMPUTING or setup.kind != "recurrences"]


@pytest.fixture(scope="module")
def kind(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Known]]:
    """Workers of each role, and what an undisturbed cluster answers."""
    setup: Setup = request.param
    build, options = MODELS[setup.kind]
    model = save_slow_model(tmp_path_factory.mktemp("models") / setup.kind, build, **options)
    drafters = {DRAFTED: f"draft={model}", DRAFTED_BY_HEAD: f"eagle={model / 'eagle'}"}
    is_drafted = setup.kind in drafters
    drafts = ("--speculate", drafters[setup.kind], "--draft-always") if is_drafted else ()
    flags = (*WORKER_FLAGS, "--kv-cache-gib", "0.8" if is_drafted else "0.4", *drafts)
    extra = {"worker": flags, "router": ROUTER_FLAGS, "gateway": GATEWAY_FLAGS}
    number = setup.num_workers
    with (
        running_cluster(model, prefill=number, decode=number, transport=setup.transport, extra=extra) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        scene = Scene(cluster)
        scene.heal()
        asked = asked_of(1, 1000, 48, 0.8)
        told = Known(asked, scene.answer_to(asked))
        assert scene.answer_to(asked_of(2, 200, 48, 0.8)) != told.token_ids, "it does not heed its prompt"
        cluster.wait(lambda: (num_drafted(cluster) > 0) == is_drafted)  # NOTE: workers count them a little later
        yield scene, told


@pytest.mark.parametrize("kind", [params(setup) for setup in SETUPS if setup.num_workers > 1], indirect=True)
def test_a_stream_goes_on_from_the_last_checkpoint(kind: tuple[Scene, Known]) -> None:
    """The worker that decodes dies: of a prompt that prefill workers had, what follows its last whole block is computed
    again, and what was generated.
    """
    scene, told = kind
    scene.heal()
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


@pytest.mark.parametrize("kind", [params(setup) for setup in SETUPS], indirect=True)
def test_clients_that_leave_free_everything(kind: tuple[Scene, Known], matrix: Matrix) -> None:
    """One in each state, all at once, and another who stays."""
    scene, told = kind
    scene.heal()
    with scene.ask(told.asked) as bystander:
        with ThreadPoolExecutor(len(Moment)) as pool:
            list(pool.map(lambda moment: leave(scene, told.asked, moment), Moment))
        bystander.wait()
        assert (bystander.error, bystander.token_ids) == (None, told.token_ids)
    free_s = scene.seconds_until_free(scene.workers(), time.monotonic(), FREE_S + REPORT_S)
    fresh_s = fresh_answer(scene, SHORT)
    matrix.append(Row("client", "every state", "leaves", f"{len(Moment)} of {len(Moment)}", None, fresh_s, free_s))


@pytest.mark.parametrize(
    ("kind", "role", "state"),
    [
        params(setup, role, state)
        for setup in SETUPS
        if setup.num_workers > 1
        for role in (PREFILL, DECODE)
        for state in states_of(setup)
    ],
    indirect=["kind"],
)
def test_a_worker_dies(kind: tuple[Scene, Known], matrix: Matrix, role: str, state: State) -> None:
    scene, told = kind
    for _ in range(NUM_STAGINGS):
        scene.heal()
        row = fault(scene, told, SHORT, role, state, KILL)
        if row is not None:
            matrix.append(row)
            return
    raise AssertionError(f"the transfer was over before the signal, {NUM_STAGINGS} times")


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        params(setup, state)
        for setup in SETUPS
        if setup.num_workers == 1
        for state in states_of(setup)
        if state in (State.COMPUTING, State.TRANSFER)
    ],
    indirect=["kind"],
)
def test_the_only_prefill_worker_dies(kind: tuple[Scene, Known], matrix: Matrix, state: State) -> None:
    scene, told = kind
    scene.heal()
    with staged(scene, state, told.asked) as target:
        scene.cluster.processes[target.prefill].kill()
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
    free_s = scene.seconds_until_free(["decode-0"], time.monotonic(), FREE_OF_LEASES_S)
    matrix.append(Row("only prefill", state, KILL, "exact, computed by decode", None, None, free_s))


@pytest.mark.parametrize("kind", [params(setup) for setup in SETUPS if setup.num_workers == 1], indirect=True)
def test_the_only_decode_worker_dies(kind: tuple[Scene, Known], matrix: Matrix) -> None:
    """Its streams end with an error, and all is well after a restart."""
    scene, told = kind
    scene.heal()
    with staged(scene, State.DECODING, told.asked) as target:
        scene.cluster.processes[target.decode].kill()
        target.answer.wait(timeout_s=max(PATIENCE_S, MAX_WAIT_S))
        assert target.answer.error is not None
        assert "no running worker takes requests for model" in target.answer.error
        assert target.answer.token_ids == told.token_ids[: len(target.answer.token_ids)]
    free_s = scene.seconds_until_free(["prefill-0"], time.monotonic(), FREE_OF_LEASES_S)
    scene.heal()
    assert scene.answer_to(told.asked) == told.token_ids
    matrix.append(Row("only decode", State.DECODING, KILL, "error", None, None, free_s))
