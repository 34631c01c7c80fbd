import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator

import pytest

from tandem.core.chain_hasher import ChainHasher
from tandem.core.errors import LocalityUnavailableError
from tandem.core.scope import UNSCOPED
from tandem.locality.redis import RedisIndex
from tandem.process.fleet_view import Chain
from tandem.router.prefix_lookup import PrefixLookup
from tests.helpers.redis_server import RedisServer, running_redis
from tests.unit.process.stub_workers import PATIENT_S

CHAIN = Chain("weights", 16, frozenset({"pool"}))
HASHES = ChainHasher().hashes(CHAIN.root(UNSCOPED), range(320), CHAIN.block_size)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_redis_is_asked_and_its_absence_is_an_empty_answer(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        index = RedisIndex(server.url, read_timeout_s=0.3, retry_after_s=0.0)
        lookup = PrefixLookup(index, is_remote=True, timeout_s=0.5)
        with contextlib.closing(index), contextlib.closing(lookup):
            index.replace("p0", 1, HASHES[:7], 0)
            assert await lookup.leading_blocks(HASHES) == {"p0": 7}
            assert await lookup.leading_blocks([]) == {}
            with server.paused():
                for _ in range(2):
                    started_s = time.monotonic()
                    assert await lookup.leading_blocks(HASHES) == {}
                    assert time.monotonic() - started_s < PATIENT_S
                with pytest.raises(LocalityUnavailableError):
                    await lookup.stats()
            async with asyncio.timeout(PATIENT_S):
                while await lookup.leading_blocks(HASHES) != {"p0": 7}:
                    pass
            assert lookup.num_unanswered >= 2
            await lookup.remove_worker("p0")
            assert await lookup.leading_blocks(HASHES) == {}

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO"]


def test_the_event_loop_goes_on_while_redis_thinks(server: RedisServer) -> None:
    async def scenario() -> None:
        index = RedisIndex(server.url, read_timeout_s=PATIENT_S)
        lookup = PrefixLookup(index, is_remote=True, timeout_s=0.2)
        with contextlib.closing(index), contextlib.closing(lookup), server.paused():
            asked = asyncio.create_task(lookup.leading_blocks(HASHES))
            started_s = time.monotonic()
            await asyncio.sleep(0)
            assert time.monotonic() - started_s < PATIENT_S / 2
            assert await asked == {}
            assert time.monotonic() - started_s < PATIENT_S / 2

    run(scenario())
