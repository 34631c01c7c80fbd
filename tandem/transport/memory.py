"""Access to a CPU pool's bytes as Python buffers, without copying."""

import ctypes

from tandem.core.errors import ConfigurationError
from tandem.transport.base import MemoryPool


class PoolBytes:
    """Views of whole blocks of a pool; they are valid as long as the pool's memory is."""

    def __init__(self, pool: MemoryPool) -> None:
        if not pool.is_cpu:
            raise ConfigurationError(f"the tcp transport needs cpu memory, not {pool.device}; use nixl")
        self._page_bytes = pool.page_bytes
        self._bytes = memoryview((ctypes.c_ubyte * pool.num_bytes).from_address(pool.address)).cast("B")

    def blocks(self, first: int, count: int) -> memoryview:
        """Returns a view of `count` blocks from `first` on."""
        return self._bytes[first * self._page_bytes : (first + count) * self._page_bytes]
