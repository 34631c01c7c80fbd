"""Weights of 4 bits, and W8A8, in a real cluster: hand-offs by either transport, the prefix cache, JSON by a schema,
and a stream that goes on when its decode worker dies, all with the tokens that one worker gives.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.conftest import ROUTER_FLAGS
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import State, staged
from tests.faults.streams import asked_of
from tests.helpers.checkpoints import save_tiny_qwen3
from tests.helpers.cluster import running_cluster
from tests.helpers.engines import serve_alone
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.serving_clients import timeline

NAMES = ("compressed int4 groups", pytest.param("compressed W8A8", marks=pytest.mark.slow))
TRANSPORTS = ("tcp", "nixl")
ASKED = asked_of(1, 600, 48, temperature=0.8)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module", params=["compressed int4 groups", pytest.param("compressed W8A8", marks=pytest.mark.slow)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    plain = save_slow_model(place / "plain", save_tiny_qwen3, num_hidden_layers=4)
    save_published(plain, FORMATS[request.param], place / "coded", place / "decoded")
    return place / "coded"


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Tokens that a single engine in this process answers."""
    options = {"native_kernels": True, "attention_backend": "auto", "max_model_len": 1024, "kv_cache_bytes": 1 << 28}
    return serve_alone(model, {"r": list(ASKED.prompt)}, {"r": ASKED.params()}, **options)["r"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def scene(request: pytest.FixtureRequest, model: Path) -> Iterator[Scene]:
    """One prefill worker and two decode workers."""
    extra = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS}
    with running_cluster(model, decode=2, transport=request.param, extra=extra) as cluster:
        found = Scene(cluster)
        found.heal()
        yield found


def test_tokens_are_those_of_one_worker_also_out_of_the_cache(scene: Scene, expected: list[int]) -> None:
    first, second = (scene.finished(ASKED.salted("cached")) for _ in range(2))
    for answer in (first, second):
        assert (answer.error, answer.token_ids) == (None, expected)
    stages = {answer.request_id: timeline(scene.cluster, answer.request_id) for answer in (first, second)}
    moved = [stage for stage in stages[first.request_id] if stage.name == "transfer"]
    assert {stage.attributes["transport"] for stage in moved} == {scene.cluster.topology.transport}
    assert sum(int(stage.attributes["num_blocks"]) for stage in moved) > 0
    cached = [stage.attributes["num_cached_tokens"] for stage in stages[second.request_id] if stage.name == "queue"]
    assert max(map(int, cached)) >= 592


def test_answers_by_a_schema_are_of_it(scene: Scene) -> None:
    body = {
        "model": scene.cluster.model,
        "prompt": ASKED.prompt,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
        "max_tokens": 100,
        "temperature": 0.0,
    }
    got = httpx.post(f"{scene.cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert got.status_code == 200, got.text
    (choice,) = got.json()["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["text"])
    assert found.keys() == {"ok", "colour"}
    assert found["colour"] in ("red", "green")


def test_a_stream_goes_on_token_exact_when_its_decode_worker_dies(scene: Scene, expected: list[int]) -> None:
    with staged(scene, State.DECODING, ASKED) as target:
        scene.cluster.processes[target.decode].kill()
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, expected)
    record = scene.cluster.get(f"/admin/requests/{target.answer.request_id}")
    assert record["num_failovers"] == 1
    scene.heal()
