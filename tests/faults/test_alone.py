"""One process of each kind: what nobody can take over is waited for, then ends with a clear error; all is well after a
restart.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from tests.faults.conftest import WAIT_S
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, MAX_FRESH_S, Scene
from tests.faults.states import NUM_DECODED, State, staged
from tests.faults.streams import PATIENCE_S, Answer, Asked, Known

MAX_SILENCE_S = 5.0
MAX_WAIT_S = WAIT_S + MAX_SILENCE_S
FREE_S = LEASE_TTL_S + 0.5
KILL, STOP = "kill -9", "SIGSTOP"


def strike(scene: Scene, name: str, signal: str) -> float:
    """Sends the signal to a process; returns the time of it, by `time.monotonic`."""
    process = scene.cluster.processes[name]
    process.kill() if signal == KILL else process.stop()
    return time.monotonic()


@pytest.mark.parametrize(
    ("state", "signal"),
    [
        (State.COMPUTING, KILL),
        pytest.param(State.COMPUTING, STOP, marks=pytest.mark.slow),
        pytest.param(State.TRANSFER, KILL, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("signal", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_without_its_only_decode_worker_a_stream_ends_with_an_error(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix, signal: str
) -> None:
    told = small_known[0.8]
    with staged(small_scene, State.DECODING, told.asked) as target:
        since_s = strike(small_scene, "decode-0", signal)
        target.answer.wait(timeout_s=MAX_WAIT_S)
        assert target.answer.error is not None
        assert "no running worker takes requests for model" in target.answer.error
        assert target.answer.token_ids == told.token_ids[: len(target.answer.token_ids)]
        silence_s = target.answer.longest_silence_s(since_s)
    refused = small_scene.finished(short)
    assert refused.error is not None
    assert "unavailable" in refused.error
    assert WAIT_S <= refused.took_s < MAX_WAIT_S
    free_s = small_scene.seconds_until_free(["prefill-0"], time.monotonic(), FREE_S)
    small_scene.heal()
    small_scene.seconds_until_free(["decode-0"], time.monotonic(), FREE_S)
    fresh = fresh_answer(small_scene, short)
    matrix.append(Row("only decode", State.DECODING, signal, "error", silence_s, fresh, free_s))


def test_streams_go_on_where_they_were_after_the_only_decode_worker_stood_still(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix
) -> None:
    """Gateway and router had both given it up: the gateway refused to go on with the same incarnation, and all failed.

    What it still computes of the old streams when it goes on reaches nobody, and is freed.
    """
    asked = [(small_known[temperature].asked, small_known[temperature].token_ids) for temperature in (0.0, 0.8, 0.0)]
    with ExitStack() as opened:
        answers = [opened.enter_context(small_scene.ask(each)) for each, _ in asked]
        for answer in answers:
            answer.wait(NUM_DECODED)
        since_s = strike(small_scene, "decode-0", STOP)
        small_scene.cluster.wait(
            lambda: all(answer.is_over or was_given_up(small_scene, answer) for answer in answers), PATIENCE_S
        )
        assert any(was_given_up(small_scene, answer) for answer in answers), "all had ended before it stood still"
        new = opened.enter_context(small_scene.ask(short))
        small_scene.cluster.wait(lambda: not is_alive(small_scene, "decode"), PATIENCE_S)
        small_scene.continue_all()
        for answer in (*answers, new):
            answer.wait()
    assert [(answer.error, answer.token_ids) for answer in answers] == [(None, tokens) for _, tokens in asked]
    assert (new.error, len(new.token_ids)) == (None, short.max_tokens)
    silence_s = max(answer.longest_silence_s(since_s) for answer in answers)
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    matrix.append(Row("only decode", State.DECODING, f"{STOP}, then SIGCONT", "exact", silence_s, new.took_s, free_s))


def was_given_up(scene: Scene, answer: Answer) -> bool:
    """Whether its worker failed, as the gateway sees it."""
    record = scene.cluster.get(f"/admin/requests/{answer.request_id}")
    return any(stage["name"] == "failover" for stage in record["stages"])


def is_alive(scene: Scene, role: str) -> bool:
    return any(row["is_alive"] for row in scene.cluster.workers() if row["role"] == role)


@pytest.mark.parametrize("signal", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_without_its_only_router_streams_go_on_and_new_requests_are_refused(
    small_scene: Scene, small_known: Mapping[float, Known], short: Asked, matrix: Matrix, signal: str
) -> None:
    told = small_known[0.0]
    with staged(small_scene, State.COMPUTING, told.asked) as target:
        since_s = strike(small_scene, "router-0", signal)
        refused = small_scene.finished(short)
        assert refused.error is not None
        assert "no router of this cluster answers" in refused.error
        assert refused.took_s < MAX_WAIT_S
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
        silence_s = target.answer.longest_silence_s(since_s)
    free_s = small_scene.seconds_until_free(small_scene.workers(), time.monotonic(), FREE_S)
    small_scene.heal()
    fresh = fresh_answer(small_scene, short)
    matrix.append(Row("only router", State.COMPUTING, signal, "exact; new ones refused", silence_s, fresh, free_s))


def fresh_answer(scene: Scene, short: Asked) -> float:
    """Seconds that a new request takes; it must not fail, nor take longer than `MAX_FRESH_S`."""
    answer = scene.finished(short)
    assert answer.error is None, answer.error
    assert answer.took_s < MAX_FRESH_S
    return answer.took_s
