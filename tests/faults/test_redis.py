"""Redis is never in the way: flushed or started anew while requests run, it changes nothing, and fills itself again."""

import time
from collections.abc import Callable, Mapping

from tests.faults.matrix import Matrix, Row
from tests.faults.scene import MAX_FRESH_S, Scene
from tests.faults.states import State, staged
from tests.faults.streams import PATIENCE_S, Asked, Known


def test_a_flushed_redis_is_filled_again(
    scene: Scene, known: Mapping[float, Known], short: Asked, matrix: Matrix
) -> None:
    assert scene.redis is not None
    redis = scene.redis

    def flush() -> None:
        with redis.client() as client:
            client.flushall()

    survives(scene, known[0.0], short, matrix, "flushed", flush)


def test_a_redis_that_lost_everything_is_filled_again(
    scene: Scene, known: Mapping[float, Known], short: Asked, matrix: Matrix
) -> None:
    assert scene.redis is not None
    redis = scene.redis

    def restart() -> None:
        redis.kill()
        redis.start()

    survives(scene, known[0.8], short, matrix, "restarted", restart)


def survives(scene: Scene, told: Known, short: Asked, matrix: Matrix, name: str, strike: Callable[[], None]) -> None:
    """A stream goes on, new requests are served, and the index knows again what the workers hold."""
    warm = told.asked.salted(scene.new_salt())
    assert scene.answer_to(warm) == told.token_ids
    cached_blocks(scene, warm)
    with staged(scene, State.DECODING, told.asked) as target:
        since_s = time.monotonic()
        strike()
        fresh = scene.finished(short)
        assert fresh.error is None
        assert fresh.took_s < MAX_FRESH_S
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
    free_s = scene.seconds_until_free(scene.workers(), time.monotonic(), 1.75)
    cached_blocks(scene, warm)
    silence_s = target.answer.longest_silence_s(since_s)
    matrix.append(Row("redis", State.DECODING, name, "exact, index filled again", silence_s, fresh.took_s, free_s))


def cached_blocks(scene: Scene, asked: Asked) -> None:
    """Wait until a router is told by the index that this prompt is held."""

    def is_known() -> bool:
        answer = scene.finished(asked)
        assert answer.error is None
        record = scene.cluster.get(f"/admin/requests/{answer.request_id}")
        (pairing,) = [stage["attributes"] for stage in record["stages"] if stage["name"] == "pair"]
        return bool(pairing["prefill_cached_blocks"] or pairing["decode_cached_blocks"])

    scene.cluster.wait(is_known, PATIENCE_S)
