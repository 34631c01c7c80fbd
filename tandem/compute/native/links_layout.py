"""Layout in bytes of the memory shared by a group of ranks: the exchange of all ranks, then an exchange for each
section, then pipes between sections.

A section is the ranks of one pipeline stage and one context (a part of a prompt's tokens); `links` numbers them. A
group with one section has only the exchange of all. With several, that one carries few bytes, since activations go
through the others. An exchange has two buffers for each rank: it fills one while others may still read the other.
"""

from enum import IntEnum

from tandem.compute.native.exchange import BUFFER_BYTES, make_memory, make_memory_of, num_bytes

_SMALL_BYTES = 1 << 16  # of a buffer in the exchange of all ranks if there are several sections


class PipeKind(IntEnum):
    """Kind of a pipe: `STREAM` to the next stage, with the residual stream, or `WORD` to the next context, with a short
    signal.
    """

    STREAM = 0
    WORD = 1


def group_buffer_bytes(num_sections: int) -> int:
    """Bytes of one of the two buffers of each rank in the exchange of all ranks."""
    return BUFFER_BYTES if num_sections == 1 else _SMALL_BYTES


def make_links_memory(num_ranks: int, num_sections: int) -> int:
    """Descriptor of new memory of fixed size for a group; the caller closes it, and ranks inherit it."""
    if num_sections == 1:
        return make_memory(num_ranks)
    return make_memory_of(pipe_offset(num_ranks, num_sections, len(PipeKind), 0, 0))


def section_offset(num_ranks: int, num_sections: int, section: int) -> int:
    """Offset of a section's exchange, from section 0; only for a group with several sections."""
    return num_bytes(num_ranks, _SMALL_BYTES) + section * num_bytes(num_ranks // num_sections, BUFFER_BYTES)


def pipe_offset(num_ranks: int, num_sections: int, kind: int, section: int, number: int) -> int:
    """Offset of the pipe of that `PipeKind` into which a rank sends: the rank `number` of the section, from 0.

    NOTE: memory that no rank touches is not allocated, so pipes that a group does not use cost nothing.
    """
    index = kind * num_ranks + section * (num_ranks // num_sections) + number
    return section_offset(num_ranks, num_sections, num_sections) + index * num_bytes(2, BUFFER_BYTES)
