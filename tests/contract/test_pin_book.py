"""Contract of records of pins, in memory and in Redis, and what a request makes of them."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import UnavailableError
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.gateway.pin_book import MemoryPinBook, PinBook, PromptPins
from tandem.gateway.pin_book_redis import RedisPinBook
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ChoiceRequest, ServeRequest
from tandem.rpc.messages import ModelInfo
from tests.helpers.redis_server import RedisServer, running_redis

SHORT, LONG = 300.0, 3600.0
BLOCK = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@dataclass
class Shelf:
    """A book, and how time passes in it."""

    book: PinBook
    pass_s: Callable[[float], None]


Story = Callable[[Shelf], Awaitable[None]]


@pytest.fixture(params=["memory", "redis"])
def tell(request: pytest.FixtureRequest) -> Callable[[Story], None]:
    """NOTE: Redis has its own clock, so there its entries are aged by shortening what is left of them."""

    def in_memory() -> Shelf:
        clock = ManualClock(1000.0)
        return Shelf(MemoryPinBook(clock), clock.advance)

    def in_redis() -> Shelf:
        running: RedisServer = request.getfixturevalue("server")
        client = running.client()
        client.flushall()

        def age(seconds: float) -> None:
            for key in client.keys("*"):
                client.pexpire(key, max(1, int(client.pttl(key) - seconds * 1000)))
            deadline = client.time()[0] + 5
            while any(client.pttl(key) in (0, 1) for key in client.keys("*")) and client.time()[0] < deadline:
                pass

        return Shelf(RedisPinBook(running.url), age)

    def run(story: Story) -> None:
        async def told() -> None:
            shelf = in_memory() if request.param == "memory" else in_redis()
            try:
                await story(shelf)
            finally:
                await shelf.book.close()

        asyncio.run(told())

    return run


def prompt(num_tokens: int, *pins: Pin, salt: str = "", first: int = 7) -> ServeRequest:
    tokens = array("I", (first, *range(1, num_tokens)))
    choice = ChoiceRequest(0, "r", tokens, SamplingParams(seed=1))
    return ServeRequest(
        request_id="r", model="m", choices=(choice,), num_expected_output=1, pins=pins, scope=CacheScope(salt=salt)
    )


INFO = ModelInfo(name="m", fingerprint="f", max_model_len=1000, vocab_size=1000, block_size=BLOCK)


async def used(shelf: Shelf, request: ServeRequest, granted: tuple[Pin, ...] | None = None) -> LivePins:
    """Live pins that the request finds; its own pins are then kept as granted."""
    pins = await PromptPins.look_up(shelf.book, request, INFO)
    await pins.keep(request.pins if granted is None else granted)
    return pins.live


def test_a_pin_is_found_until_its_time_is_over(tell: Callable[[Story], None]) -> None:
    async def story(shelf: Shelf) -> None:
        ask = prompt(40, Pin(33, LONG))
        assert await used(shelf, ask, ()) == LivePins(0, 0)
        assert await used(shelf, ask) == LivePins(0, 0)
        shelf.pass_s(LONG - 60)
        assert await used(shelf, ask, ()) == LivePins(32, 32)
        shelf.pass_s(61)
        assert await used(shelf, ask, ()) == LivePins(0, 0)

    tell(story)


def test_use_begins_its_time_anew(tell: Callable[[Story], None]) -> None:
    async def story(shelf: Shelf) -> None:
        ask = prompt(40, Pin(32, SHORT))
        await used(shelf, ask)
        shelf.pass_s(SHORT - 1)
        assert await used(shelf, ask) == LivePins(32, 0)
        shelf.pass_s(SHORT - 1)
        assert await used(shelf, ask, ()) == LivePins(32, 0)

    tell(story)


def test_a_longer_prompt_finds_what_was_kept_of_its_beginning_and_refreshes_it(
    tell: Callable[[Story], None],
) -> None:
    async def story(shelf: Shelf) -> None:
        await used(shelf, prompt(20, Pin(16, SHORT)))
        shelf.pass_s(SHORT - 1)
        assert await used(shelf, prompt(40, Pin(36, SHORT))) == LivePins(16, 0)
        shelf.pass_s(SHORT - 1)
        assert await used(shelf, prompt(20, Pin(16, SHORT)), ()) == LivePins(16, 0)

    tell(story)


def test_a_shorter_life_does_not_shorten_a_longer_one(tell: Callable[[Story], None]) -> None:
    async def story(shelf: Shelf) -> None:
        await used(shelf, prompt(20, Pin(16, LONG)))
        assert await used(shelf, prompt(20, Pin(16, SHORT))) == LivePins(16, 16)
        shelf.pass_s(SHORT + 1)
        assert await used(shelf, prompt(20, Pin(16, SHORT)), ()) == LivePins(16, 16)

    tell(story)


def test_what_was_not_granted_is_not_kept(tell: Callable[[Story], None]) -> None:
    async def story(shelf: Shelf) -> None:
        await used(shelf, prompt(40, Pin(32, LONG)), (Pin(8, LONG),))
        assert await used(shelf, prompt(40, Pin(32, LONG)), ()) == LivePins(8, 8)

    tell(story)


def test_tenants_and_other_prompts_find_nothing(tell: Callable[[Story], None]) -> None:
    async def story(shelf: Shelf) -> None:
        await used(shelf, prompt(40, Pin(32, LONG), salt="a"))
        assert await used(shelf, prompt(40, Pin(32, LONG), salt="b"), ()) == LivePins()
        assert await used(shelf, prompt(40, Pin(32, LONG), salt="a", first=8), ()) == LivePins()

    tell(story)


def test_a_full_book_forgets_what_ends_first() -> None:
    async def story() -> None:
        clock = ManualClock()
        book = MemoryPinBook(clock, max_entries=10)
        for number in range(11):
            await book.keep({bytes([number]): 100.0 + number})
        found = await book.find([bytes([number]) for number in range(11)])
        assert found[:2] == [None, None]
        assert all(lifetime is not None for lifetime in found[2:])

    asyncio.run(story())


def test_a_redis_that_is_away_is_said_and_nonsense_in_it_is_nothing_kept() -> None:
    async def story() -> None:
        with running_redis() as server:
            book = RedisPinBook(server.url)
            await book.keep({b"k" * 32: 60.0})
            (key,) = server.client().keys("*")
            server.client().set(key, "nonsense")
            assert await book.find([b"k" * 32]) == [None]
            await book.keep({b"k" * 32: 60.0})
            assert await book.find([b"k" * 32]) == [60.0]
            server.kill()
            with pytest.raises(UnavailableError):
                await book.find([b"k" * 32])
            with pytest.raises(UnavailableError):
                await book.keep({b"k" * 32: 60.0})
            await book.close()

    asyncio.run(story())
