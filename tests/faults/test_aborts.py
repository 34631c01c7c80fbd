"""Clients that leave at random moments: once the last has left, what they held is free sooner than a lease would end.
Others notice nothing.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

import pytest

from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, MAX_FRESH_S, REPORT_S, Scene
from tests.faults.states import NUM_DECODED
from tests.faults.streams import PATIENCE_S, Answer, Asked, Known

FREE_S = LEASE_TTL_S - 0.5  # NOTE: a release that is lost takes the whole lease
NUM_AT_ONCE = 10
NUM_NEVER_READ = 1000


class Moment(StrEnum):
    """Point of a request at which its client leaves."""

    SENT = "just sent"
    PAIRED = "paired"
    COMPUTING = "between chunks"
    TRANSFER = "transfer under way"
    FIRST = "after the first token"
    DECODING = "mid-decode"


# NOTE: among nine, as they are drawn, is every moment
@pytest.mark.parametrize("num_aborts", [9, *(pytest.param(number, marks=pytest.mark.slow) for number in (20, 100))])
def test_clients_that_leave_free_everything(
    scene: Scene, known: Mapping[float, Known], short: Asked, matrix: Matrix, num_aborts: int
) -> None:
    source = random.Random(num_aborts)
    told = known[0.0]
    moments = [source.choice(list(Moment)) for _ in range(num_aborts)]
    slowest_s, slowest_new_s = 0.0, 0.0
    for start in range(0, num_aborts, NUM_AT_ONCE):
        batch = moments[start : start + NUM_AT_ONCE]
        with scene.ask(told.asked) as bystander:
            with ThreadPoolExecutor(len(batch)) as pool:
                list(pool.map(lambda moment: leave(scene, told.asked, moment), batch))
            bystander.wait()
            assert (bystander.error, bystander.token_ids) == (None, told.token_ids)
        free_s = scene.seconds_until_free(scene.workers(), time.monotonic(), FREE_S + REPORT_S)
        fresh = scene.finished(short)
        assert (fresh.error, len(fresh.token_ids)) == (None, short.max_tokens)
        assert fresh.took_s < MAX_FRESH_S
        slowest_s, slowest_new_s = max(slowest_s, free_s), max(slowest_new_s, fresh.took_s)
    for moment, count in sorted(Counter(moments).items()):
        matrix.append(Row("client", moment, "leaves", f"{count} of {num_aborts}", None, slowest_new_s, slowest_s))


def leave(scene: Scene, asked: Asked, moment: Moment) -> None:
    """Ask for more than can come before the moment, however late this thread notices it; then hang up."""
    asked = replace(asked, salt=scene.new_salt(), max_tokens=NUM_NEVER_READ)
    if moment is Moment.TRANSFER:
        scene.warm_prefill(asked)
    with scene.ask(asked) as answer:
        _ARRIVED[moment](scene, answer)
        assert not answer.is_over, f"{moment}: it ended before its client left: {answer.error}"
    assert answer.error is not None, f"{moment}: it ended well"
    assert answer.error.startswith("connection lost"), f"{moment}: {answer.error}"


def _until_paired(scene: Scene, answer: Answer) -> str:
    found: list[str] = []

    def is_paired() -> bool:
        with suppress(StopIteration):
            found.append(scene.pairing(answer)["prefill"])
        return bool(found)

    scene.cluster.wait(is_paired, PATIENCE_S)
    return found[-1]


def _until_computing(scene: Scene, answer: Answer) -> None:
    """NOTE: what is seen leased may be another's; sooner or later each is met in the middle."""
    prefill = _until_paired(scene, answer)
    scene.cluster.wait(lambda: scene.cluster.blocks(prefill)["leased"] or answer.pieces, PATIENCE_S)


_ARRIVED: dict[Moment, Callable[[Scene, Answer], object]] = {
    Moment.SENT: lambda _, __: None,
    Moment.PAIRED: _until_paired,
    Moment.COMPUTING: _until_computing,
    Moment.TRANSFER: lambda _, answer: answer.wait(1),
    Moment.FIRST: lambda _, answer: answer.wait(1),
    Moment.DECODING: lambda _, answer: answer.wait(NUM_DECODED),
}
