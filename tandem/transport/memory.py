"""Access to a CPU pool's bytes as Python buffers, without copying."""

import ctypes

from tandem.core.errors import ConfigurationError
from tandem.transport.base import MemoryPool


class PoolBytes:
    """Views of whole blocks of a pool; they are valid as long as the pool's memory is."""

    def __init__(self, pool: MemoryPool) -> None:
        if not pool.is_cpu:
            raise ConfigurationError(f"the tcp transport needs cpu memory, not {pool.device}; use nixl")
        self._bytes = memoryview((ctypes.c_ubyte * pool.num_bytes).from_address(pool.address)).cast("B")

    def blocks(self, first: int, count: int, unit_bytes: int) -> memoryview:
        """Returns a view of `count` blocks of `unit_bytes` from `first` on."""
        return self._bytes[first * unit_bytes : (first + count) * unit_bytes]
