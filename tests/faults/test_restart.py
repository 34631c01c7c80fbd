"""A worker that was started again at the same address is another one: nothing meant for the first reaches it."""

import asyncio
import time
from collections.abc import Mapping

import pytest

from tandem.core.errors import WorkerLostError
from tandem.core.scope import CacheScope
from tandem.rpc.messages import GenerateCall, WorkerAddress
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, Scene, addresses, generate
from tests.faults.states import State, staged
from tests.faults.streams import Known

SLACK_S = 0.5


@pytest.mark.parametrize(("role", "state"), [("prefill", State.COMPUTING), ("decode", State.DECODING)])
def test_a_worker_restarted_at_its_address(
    scene: Scene, known: Mapping[float, Known], matrix: Matrix, role: str, state: State
) -> None:
    told = known[0.0]
    with staged(scene, state, told.asked) as target:
        name = target.prefill if role == "prefill" else target.decode
        before = address_of(scene, role, name)
        since_s = time.monotonic()
        scene.cluster.processes[name].kill()
        scene.cluster.processes[name].start()
        target.answer.wait()
        assert (target.answer.error, target.answer.token_ids) == (None, told.token_ids)
    scene.cluster.processes[name].wait_ready()
    scene.heal()
    after = address_of(scene, role, name)
    assert (after.worker_id, after.address) == (before.worker_id, before.address)
    assert after.incarnation != before.incarnation
    pair = {"prefill": address_of(scene, "prefill"), "decode": address_of(scene, "decode")} | {role: after}
    assert served_by(scene, told, pair["prefill"], pair["decode"]) == told.token_ids
    if role == "decode":
        with pytest.raises(WorkerLostError, match=before.incarnation):
            served_by(scene, told, pair["prefill"], before)
    else:
        assert served_by(scene, told, before, pair["decode"]) == told.token_ids
    free_s = scene.seconds_until_free(scene.workers(), time.monotonic(), LEASE_TTL_S + SLACK_S)
    silence_s = target.answer.longest_silence_s(since_s)
    matrix.append(Row(role, state, "restarted", "exact, old address refused", silence_s, None, free_s))


def address_of(scene: Scene, role: str, name: str | None = None) -> WorkerAddress:
    """Of that worker, or of any."""
    return next(worker for worker in addresses(scene.cluster, role) if name in (None, worker.worker_id))


def served_by(scene: Scene, told: Known, prefill: WorkerAddress, decode: WorkerAddress) -> list[int]:
    """The tokens that exactly these workers generate."""
    call = GenerateCall(
        request_id=f"request-{scene.new_salt()}",
        prompt_token_ids=told.asked.prompt,
        params=told.asked.params(),
        scope=CacheScope(salt=scene.new_salt()),
        decode=decode,
        prefill=prefill,
    )
    return asyncio.run(generate(call))[0]
