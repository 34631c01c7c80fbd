"""One process of each kind: what nobody can take over ends with a clear error, and all is well after a restart."""

import time
from collections.abc import Mapping

import pytest

from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, Scene
from tests.faults.states import State, staged
from tests.faults.streams import Asked, Known

MAX_SILENCE_S = 5.0
MAX_FRESH_S = 1.75  # NOTE: a router that still trusts the dead one takes 2 s
FREE_S = LEASE_TTL_S + 0.5
KILL, STOP = "kill -9", "SIGSTOP"


def strike(scene: Scene, name: str, signal: str) -> float:
    """When it was done, by `time.monotonic`."""
    process = scene.cluster.processes[name]
    process.kill() if signal == KILL else process.stop()
    return time.monotonic()


@pytest.mark.parametrize(
    ("state", "signal"),
    [
        (State.COMPUTING, KILL),
        pytest.param(State.COMPUTING, STOP, marks=pytest.mark.slow),
        (State.TRANSFER, KILL),
        (State.TRANSFER, STOP),
    ],
)
def test_without_its_only_prefill_worker_decode_computes_itself(
    small_scene: Scene, small_known: Mapping[float, Known], matrix: Matrix, state: State, signal: str
) -> None:
    told = small_known[0.0]
    with staged(small_scene, state, told.asked) as target:
        since_s = strike(small_scene, target.prefill, signal)
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
        silence_s = target.answer.longest_silence_s(since_s)
        assert silence_s < MAX_SILENCE_S
    free_s = small_scene.seconds_until_free(["decode-0"], time.monotonic(), FREE_S)
    fresh = small_scene.finished(told.asked)
    assert (fresh.error, fresh.token_ids) == (None, told.token_ids)
    matrix.append(Row("only prefill", state, signal, "exact, computed by decode", silence_s, None, free_s))


@pytest.mark.parametrize("signal", [KILL, STOP])
def test_without_its_only_decode_worker_a_stream_ends_with_an_error(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix, signal: str
) -> None:
    told = small_known[0.8]
    with staged(small_scene, State.DECODING, told.asked) as target:
        since_s = strike(small_scene, "decode-0", signal)
        target.answer.wait(timeout_s=MAX_SILENCE_S)
        assert target.answer.error is not None
        assert "no worker for model" in target.answer.error
        assert target.answer.token_ids == told.token_ids[: len(target.answer.token_ids)]
        silence_s = target.answer.longest_silence_s(since_s)
    refused = small_scene.finished(short)
    assert refused.error is not None
    assert "unavailable" in refused.error
    assert refused.took_s < MAX_SILENCE_S
    free_s = small_scene.seconds_until_free(["prefill-0"], time.monotonic(), FREE_S)
    small_scene.heal()
    fresh = fresh_answer(small_scene, short)
    matrix.append(Row("only decode", State.DECODING, signal, "error", silence_s, fresh, free_s))


@pytest.mark.parametrize("signal", [KILL, STOP])
def test_without_its_only_router_streams_go_on_and_new_requests_are_refused(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix, signal: str
) -> None:
    told = small_known[0.0]
    with staged(small_scene, State.COMPUTING, told.asked) as target:
        since_s = strike(small_scene, "router-0", signal)
        refused = small_scene.finished(short)
        assert refused.error is not None
        assert "no router answers" in refused.error
        assert refused.took_s < MAX_SILENCE_S
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
        silence_s = target.answer.longest_silence_s(since_s)
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    small_scene.heal()
    fresh = fresh_answer(small_scene, short)
    matrix.append(Row("only router", State.COMPUTING, signal, "exact; new ones refused", silence_s, fresh, free_s))


def fresh_answer(scene: Scene, short: Asked) -> float:
    """How long a new request takes."""
    answer = scene.finished(short)
    assert answer.error is None, answer.error
    assert answer.took_s < MAX_FRESH_S
    return answer.took_s
