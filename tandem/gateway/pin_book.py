"""Pin book: records the prompt prefixes that clients have paid to keep cached, so that none is billed twice.

Workers keep the blocks themselves; this book is only for billing. Keys are chained block hashes, which cover model and
tenant. If the book is unavailable the operator bears the cost, not the client: nothing is billed as written.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.pins import Pin
from tandem.gateway.cache_lifetimes import SHORT_S
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ServeRequest
from tandem.rpc.messages import ModelInfo

DEFAULT_MAX_ENTRIES = 1 << 18  # of the book in memory


class PinBook(Protocol):
    """Interface of a pin book: pinned prefixes by the hash of their last block. Owned by one event loop."""

    async def find(self, keys: Sequence[bytes]) -> Sequence[float | None]:
        """For each key, the lifetime in seconds with which it was pinned; None where it was not, or the lifetime is
        over.

        Raises:
            UnavailableError: the book is unavailable.
        """
        ...

    async def keep(self, lifetimes: Mapping[bytes, float]) -> None:
        """Pins each key for its seconds from now; a longer remaining lifetime is not shortened. Raises as `find`."""
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...


class MemoryPinBook:
    """A pin book in memory, for one gateway. Bounded; entries that expire first are evicted first."""

    def __init__(self, clock: Clock, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._entries: dict[bytes, tuple[float, float]] = {}  # key: (until, lifetime)

    async def find(self, keys: Sequence[bytes]) -> Sequence[float | None]:
        return [self._lifetime(key) for key in keys]

    async def keep(self, lifetimes: Mapping[bytes, float]) -> None:
        now_s = self._clock.now_s()
        for key, lifetime_s in lifetimes.items():
            until_s, known_s = self._entries.get(key, (0.0, 0.0)) if self._lifetime(key) else (0.0, 0.0)
            self._entries[key] = (max(until_s, now_s + lifetime_s), max(known_s, lifetime_s))
        if len(self._entries) > self._max_entries:
            self._shrink(now_s)

    async def close(self) -> None: ...

    def _lifetime(self, key: bytes) -> float | None:
        until_s, lifetime_s = self._entries.get(key, (0.0, 0.0))
        return lifetime_s if until_s > self._clock.now_s() else None

    def _shrink(self, now_s: float) -> None:
        """Evicts a tenth more than necessary, so that this is rare."""
        alive = sorted((until_s, key) for key, (until_s, _) in self._entries.items() if until_s > now_s)
        kept = {key for _, key in alive[-(self._max_entries * 9 // 10) :]}
        self._entries = {key: entry for key, entry in self._entries.items() if key in kept}


class PromptPins:
    """Access to the pin book for one request. `live`: the part of its prompt that earlier pins keep."""

    def __init__(self, book: PinBook, hashes: Sequence[bytes], block_size: int) -> None:
        self._book = book
        self._hashes = hashes
        self._block_size = block_size
        self.live = LivePins()

    @classmethod
    async def look_up(cls, book: PinBook, request: ServeRequest, info: ModelInfo) -> "PromptPins":
        """Looks up a request's prompt. Raises as `PinBook.find`."""
        num_tokens = max((pin.num_tokens for pin in request.pins), default=0)
        root = root_hash(request.scope, model_fingerprint=info.fingerprint, block_size=info.block_size)
        hashes: list[bytes] = []
        extend_hashes(root, hashes, request.choices[0].prompt_token_ids[:num_tokens], info.block_size)
        pins = cls(book, hashes, info.block_size)
        pins.live = pins._live(await book.find(hashes))
        return pins

    async def keep(self, granted: Sequence[Pin]) -> None:
        """Records granted pins. Earlier pins of the same prompt that they cover are renewed with their lifetime."""
        lifetimes: dict[bytes, float] = {}
        for pin in (*granted, *self._refreshed(granted)):
            if num_blocks := pin.num_tokens // self._block_size:
                key = self._hashes[num_blocks - 1]
                lifetimes[key] = max(lifetimes.get(key, 0.0), pin.ttl_s)
        if lifetimes:
            await self._book.keep(lifetimes)

    def _live(self, found: Sequence[float | None]) -> LivePins:
        ends = [(index + 1) * self._block_size for index in range(len(found))]
        kept = [(end, lifetime) for end, lifetime in zip(ends, found, strict=True) if lifetime is not None]
        return LivePins(
            max((end for end, _ in kept), default=0),
            max((end for end, lifetime in kept if lifetime > SHORT_S), default=0),
        )

    def _refreshed(self, granted: Sequence[Pin]) -> list[Pin]:
        """Earlier pins that a granted pin covers, with its lifetime."""
        return [
            Pin(num_tokens, pin.ttl_s)
            for num_tokens in {self.live.num_any, self.live.num_long}
            for pin in granted
            if 0 < num_tokens <= pin.num_tokens
        ]
