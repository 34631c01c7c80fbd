"""Cache of the token ids and block hashes of prompts' beginnings, so that a chat's next turn encodes only its new text.

A prompt is cut into pieces where its tokenizer splits the text in any case (`text.cuts`). Each cut has a key: SHA-256
over the previous key and the bytes between the two cuts. The first key is computed from the request's root hash, which
covers model and tenant. So no tenant finds another's pieces, and equal keys mean equal beginnings. Bounded in bytes;
the least recently used piece is evicted first, and never before a later piece of the same prompt.
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

MIN_PIECE_BYTES = 1024  # of text; a piece of its own takes some 400 bytes beside its tokens
PIECE_OVERHEAD_BYTES = 400  # measured: memory of a piece's key, cache entry and object headers
DEFAULT_MAX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens and block hashes of one piece of a prompt.

    Args:
        token_ids: packed, 4 bytes each.
        hashes: concatenated hashes of the blocks that end in this piece.
    """

    token_ids: bytes
    hashes: bytes

    @property
    def num_bytes(self) -> int:
        """Memory that the piece takes in the cache."""
        return len(self.token_ids) + len(self.hashes) + PIECE_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class CutBeginning:
    """The beginning of a prompt, of which only the text after the last cut is stored.

    Args:
        keys: the keys of its cuts.
        sizes: bytes of each piece before a cut.
        rest: the text after the last cut, in UTF-8.
    """

    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]
    rest: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole beginning's text."""
        return sum(self.sizes) + len(self.rest)


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """A prompt cut into pieces.

    Args:
        pieces: text of each piece in UTF-8; empty for pieces of a beginning that the prompt was resumed from.
        keys: the key of each cut between two pieces, so one fewer than pieces. Each covers all text before it.
        sizes: bytes of each piece.
    """

    pieces: Sequence[bytes]
    keys: Sequence[bytes]
    sizes: Sequence[int]

    @classmethod
    def of(cls, text: str, token: str, root: bytes, beginning: CutBeginning | None = None) -> "CutPrompt":
        """Cuts `text` before occurrences of `token` that are at least `MIN_PIECE_BYTES` apart.

        Args:
            root: the hash from which the first key is computed.
            beginning: the beginning of the prompt, if `text` only continues it.
        """
        data = text.encode("utf-8", "surrogatepass")
        before = CutBeginning((), (), b"") if beginning is None else beginning
        pieces = _pieces(before.rest + data, token.encode())
        keys = list(before.keys)
        for piece in pieces[:-1]:
            keys.append(hashlib.sha256((keys[-1] if keys else root) + piece).digest())
        empty = [b""] * len(before.keys)
        return cls([*empty, *pieces], keys, [*before.sizes, *map(len, pieces)])

    def beginning(self, num_bytes: int, token: str) -> CutBeginning:
        """The first `num_bytes` of the prompt, cut only where every prompt with these first bytes is cut.

        They end after the last cut of the beginning that this prompt was resumed from.
        """
        ends = list(accumulate(self.sizes))[:-1]
        number = bisect_right(ends, num_bytes - len(token.encode()))
        start = ends[number - 1] if number else 0
        return CutBeginning(
            tuple(self.keys[:number]),
            tuple(self.sizes[:number]),
            b"".join(self.pieces[number:])[: num_bytes - start],
        )


def _pieces(data: bytes, token: bytes) -> list[bytes]:
    pieces, start = [], 0
    while (end := data.find(token, start + MIN_PIECE_BYTES)) >= 0:
        pieces.append(data[start:end])
        start = end
    pieces.append(data[start:])
    return pieces


class KnownPrefixes:
    """The cache: pieces by the key of the cut that ends them. Used by one thread."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[bytes, Piece] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def leading(self, keys: Sequence[bytes]) -> list[Piece]:
        """The cached pieces of the prompt with these keys, from its first piece to the first one that is not cached."""
        found = []
        for key in keys:
            piece = self._pieces.get(key)
            if piece is None:
                break
            found.append(piece)
        self._touch(keys[: len(found)])
        return found

    def add(self, keys: Sequence[bytes], pieces: Sequence[Piece]) -> None:
        """Adds the pieces of one prompt, beginning with its first; pieces that are cached already stay unchanged."""
        for key, piece in zip(keys, pieces, strict=True):
            if key not in self._pieces:
                self._pieces[key] = piece
                self.num_bytes += piece.num_bytes
        self._touch(keys)
        while self.num_bytes > self._max_bytes:
            _, piece = self._pieces.popitem(last=False)
            self.num_bytes -= piece.num_bytes

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Marks pieces as recently used. NOTE: the first one last, because without it the others cannot be found."""
        for key in reversed(keys):
            self._pieces.move_to_end(key)
