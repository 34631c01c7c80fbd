"""A worker's states, and when nothing runs any more."""

import asyncio

import pytest

from tandem.core.errors import UnavailableError
from tandem.worker.lifecycle import Lifecycle, LifecycleState


def test_it_takes_work_only_while_ready() -> None:
    lifecycle = Lifecycle("w")
    with pytest.raises(UnavailableError, match="w is starting"):
        lifecycle.require_ready()
    lifecycle.ready()
    lifecycle.require_ready()
    lifecycle.drain()
    lifecycle.ready()
    with pytest.raises(UnavailableError, match="w is draining"):
        lifecycle.require_ready()
    lifecycle.stopped()
    lifecycle.drain()
    assert lifecycle.state is LifecycleState.STOPPED


def test_draining_ends_with_the_last_of_what_runs() -> None:
    async def main() -> None:
        lifecycle = Lifecycle("w")
        assert await lifecycle.until_idle(0)
        with lifecycle.working():
            with lifecycle.working():
                assert not await lifecycle.until_idle(0)
            assert not await lifecycle.until_idle(0)
            waiting = asyncio.create_task(lifecycle.until_idle(5))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting

    asyncio.run(main())


def test_a_change_wakes_those_who_wait_for_one() -> None:
    async def main() -> None:
        lifecycle = Lifecycle("w")
        assert not await lifecycle.changed_within(0)
        waiting = asyncio.create_task(lifecycle.changed_within(5))
        drained = asyncio.create_task(lifecycle.until_drained())
        await asyncio.sleep(0)
        lifecycle.drain()
        assert await waiting
        await drained
        assert not await lifecycle.changed_within(0)

    asyncio.run(main())


def test_a_recovering_worker_takes_no_work_until_it_is_ready_again_or_drains() -> None:
    lifecycle = Lifecycle("w")
    lifecycle.recovering(True)
    at_first = lifecycle.state
    assert at_first is LifecycleState.STARTING, "it has taken no work yet"
    lifecycle.recovering(False)
    lifecycle.ready()
    lifecycle.recovering(True)
    with pytest.raises(UnavailableError, match="worker w is recovering and takes no new work"):
        lifecycle.require_ready()
    lifecycle.recovering(False)
    lifecycle.require_ready()
    lifecycle.recovering(True)
    lifecycle.drain()
    lifecycle.recovering(False)
    assert lifecycle.state is LifecycleState.DRAINING


def test_a_worker_that_recovers_while_it_starts_takes_work_once_it_has_recovered() -> None:
    """It said that it was ready, and its calls waited for the new group."""
    lifecycle = Lifecycle("w")
    lifecycle.recovering(True)
    lifecycle.ready()
    with pytest.raises(UnavailableError, match="worker w is recovering"):
        lifecycle.require_ready()
    lifecycle.recovering(False)
    lifecycle.require_ready()
