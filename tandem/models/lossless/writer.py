"""Writer of a safetensors file with some tensors of a checkpoint, bfloat16 ones losslessly compressed if wanted; see
`file` for the layout.

A tensor is read and compressed a few MiB at a time. Sizes of compressed streams are only known then, so the header is
written last, into space reserved for the longest possible header.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch

from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.checkpoint import Checkpoint
from tandem.models.lossless.exponents import CHUNK, encode
from tandem.models.lossless.file import (
    CHUNK_KEY,
    PARTS,
    REST,
    STREAMS,
    TABLE,
    VERSION,
    VERSION_KEY,
    in_threads,
    num_threads,
)
from tandem.models.safetensors_header import HeaderEntry, safetensors_header

_PIECE_BYTES: Final = 16 << 20
_NAMES: Final = {  # safetensors'
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Compressed:
    """A tensor to compress."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return ceil(prod(self.shape) / CHUNK)


class TensorWriter:
    """Writes tensors of a checkpoint to one file.

    Args:
        checkpoint: the checkpoint that has the tensors.
        names: tensors to write.
        lossless: bfloat16 tensors are compressed.
        on_bytes: called with the bytes of the checkpoint's tensors written since the last call.

    Raises:
        UnsupportedCheckpointError: a tensor has a dtype that safetensors do not have, or a name like a part of a
            compressed tensor.
    """

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], *, lossless: bool, on_bytes: OnBytes) -> None:
        self._checkpoint = checkpoint
        self._on_bytes = on_bytes
        outlines = {name: checkpoint.outline(name) for name in names}
        for name, outline in outlines.items():
            if outline.dtype not in _NAMES or name.endswith(PARTS):
                problem = f"the dtype {outline.dtype}" if outline.dtype not in _NAMES else "a name for parts of tensors"
                raise UnsupportedCheckpointError(f"{checkpoint.file_of(name)}: {name} has {problem}, and stays there")
        self._compressed = [
            _Compressed(name, tuple(outline.shape))
            for name, outline in outlines.items()
            if lossless and outline.dtype == torch.bfloat16
        ]
        compressed = {each.name for each in self._compressed}
        self._plain = {name: outline for name, outline in outlines.items() if name not in compressed}
        self._metadata = {"format": "pt"}
        if lossless:
            self._metadata |= {VERSION_KEY: VERSION, CHUNK_KEY: str(CHUNK)}

    def write(self, path: Path) -> None:
        """Writes the file. Raises OSError."""
        room = len(self._header([2 * prod(each.shape) + (1 << 20) for each in self._compressed]))
        with path.open("wb") as file:
            file.seek(room)
            tables_at = room
            for name in self._aligned():
                if name is not None:
                    self._write_plain(file, name)
                else:
                    tables_at = file.tell()
                    file.seek(sum(8 * each.num_chunks for each in self._compressed), os.SEEK_CUR)
            compressed = [self._write_compressed(file, each) for each in self._compressed]
            file.seek(tables_at)
            file.write(b"".join(table for _, table in compressed))
            file.seek(0)
            file.write(self._header([num_bytes for num_bytes, _ in compressed], room))

    def _aligned(self) -> Iterator[str | None]:
        """Names of plain tensors, widest dtypes first, so that each begins at a multiple of its element size; None
        marks the position of the chunk tables.
        """
        widths = [(-outline.element_size(), 1, name) for name, outline in self._plain.items()]
        for _, is_plain, name in sorted([*widths, (-4, 0, "")]):
            yield name if is_plain else None

    def _header(self, num_stream_bytes: Sequence[int], least_bytes: int = 0) -> bytes:
        entries: list[HeaderEntry] = []
        for name in self._aligned():
            if name is None:
                for each in self._compressed:
                    entries.append((each.name + TABLE, (each.num_chunks, 2), "U32", 8 * each.num_chunks))
            else:
                outline = self._plain[name]
                entries.append((name, tuple(outline.shape), _NAMES[outline.dtype], outline.nbytes))
        for each, num_bytes in zip(self._compressed, num_stream_bytes, strict=True):
            entries.append((each.name + REST, each.shape, "U8", prod(each.shape)))
            entries.append((each.name + STREAMS, (num_bytes,), "U8", num_bytes))
        return safetensors_header(entries, self._metadata, least_bytes)

    def _write_plain(self, file: BinaryIO, name: str) -> None:
        for piece in self._pieces(name, _PIECE_BYTES // self._plain[name].element_size()):
            file.write(piece.view(torch.uint8).numpy().data)

    def _write_compressed(self, file: BinaryIO, compressed: _Compressed) -> tuple[int, bytes]:
        """Writes a compressed tensor, signs and mantissas first, since their size is known. Returns the bytes of its
        streams, and its table of chunks.
        """
        rest_at, size = file.tell(), prod(compressed.shape)
        streams_at = rest_at + size
        table = []
        for piece in self._pieces(compressed.name, CHUNK * max(num_threads(), _PIECE_BYTES // (2 * CHUNK))):
            words = piece.view(torch.int16).numpy().view(np.uint16)
            found = in_threads(encode, [words[start : start + CHUNK] for start in range(0, words.size, CHUNK)])
            file.seek(rest_at)
            rest_at += sum(file.write(rest.data) for rest, _, _ in found)
            file.seek(streams_at)
            streams_at += sum(file.write(stream) for _, stream, _ in found)
            table += [(len(stream), checksum) for _, stream, checksum in found]
        file.seek(streams_at)
        return streams_at - rest_at, np.array(table, "<u4").tobytes()

    def _pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """Numbers of a tensor in order, in pieces of limited size."""
        outline = self._checkpoint.outline(name)
        whole = None if outline.is_contiguous() else self._checkpoint.tensor(name).reshape(-1)
        for start in range(0, outline.numel(), numel):
            part = slice(start, start + numel)
            piece = self._checkpoint.read(name, outline.view(-1)[part]) if whole is None else whole[part]
            yield piece
            num_bytes = piece.nbytes
            del piece
            self._on_bytes(num_bytes)
            self._checkpoint.touched(num_bytes)
