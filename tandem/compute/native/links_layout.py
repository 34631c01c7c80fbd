"""Layout in bytes of the shared memory of a group of ranks: the exchange of all, then those within sections (see
`links`), then pipes.
"""

from enum import IntEnum

from tandem.compute.native.exchange import BUFFER_BYTES, make_memory, make_memory_of, num_bytes

_SMALL_BYTES = 1 << 16  # of a buffer for exchanges without rows of activations


class PipeKind(IntEnum):
    """Kind of a pipe: to the next stage with the residual stream, or to the next context with a short signal."""

    STREAM = 0
    WORD = 1


def group_buffer_bytes(num_sections: int) -> int:
    """Bytes of one of the two buffers of each rank in the exchange of all ranks."""
    return BUFFER_BYTES if num_sections == 1 else _SMALL_BYTES


def make_links_memory(num_ranks: int, num_sections: int) -> int:
    """Descriptor of new memory for a group; the caller closes it."""
    if num_sections == 1:
        return make_memory(num_ranks)
    return make_memory_of(pipe_offset(num_ranks, num_sections, len(PipeKind), 0, 0))


def shard_offset(num_ranks: int, num_sections: int, section: int) -> int:
    """Offset of the exchange within a section, if there are several sections."""
    return num_bytes(num_ranks, _SMALL_BYTES) + section * num_bytes(num_ranks // num_sections, BUFFER_BYTES)


def pipe_offset(num_ranks: int, num_sections: int, kind: int, section: int, number: int) -> int:
    """Offset of the pipe of that kind in which rank `number` of a section sends.

    NOTE: memory that no rank touches is not allocated, so pipes that a group does not use cost nothing.
    """
    index = kind * num_ranks + section * (num_ranks // num_sections) + number
    return shard_offset(num_ranks, num_sections, num_sections) + index * num_bytes(2, BUFFER_BYTES)
