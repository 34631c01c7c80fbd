"""Token ids and block hashes of prompts' beginnings, so that a conversation's next turn costs what is new in it.

A prompt is cut where its tokenizer cuts in any case (`text.cuts`). Each cut has a key: SHA-256 over the key before it,
first the request's root hash, which covers model and tenant, and the bytes between. So tenants find nothing of each
other, and equal keys mean equal beginnings. Bounded in bytes; the least recently used piece goes first, and never
before one after it.
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

MIN_PIECE_BYTES = 1024  # of text; a piece of its own takes some 400 bytes beside its tokens
PIECE_OVERHEAD_BYTES = 400  # measured: key, entry and the objects' heads
DEFAULT_MAX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Contribution of one piece of text to a prompt.

    Args:
        token_ids: packed, 4 bytes each.
        hashes: of the blocks that its tokens complete, one after the other.
    """

    token_ids: bytes
    hashes: bytes

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes."""
        return len(self.token_ids) + len(self.hashes) + PIECE_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class CutBeginning:
    """The beginning of a prompt, without its text before the last cut.

    Args:
        keys: of its cuts.
        sizes: bytes of the pieces before them.
        rest: what follows the last cut.
    """

    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]
    rest: bytes

    @property
    def num_bytes(self) -> int:
        """Of text."""
        return sum(self.sizes) + len(self.rest)


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """A prompt in pieces.

    Args:
        pieces: their text; empty for those of a beginning that the prompt was resumed from.
        keys: of the places between them, so one fewer. Each covers the one before it.
        sizes: bytes of each piece.
    """

    pieces: Sequence[bytes]
    keys: Sequence[bytes]
    sizes: Sequence[int]

    @classmethod
    def of(cls, text: str, token: str, root: bytes, beginning: CutBeginning | None = None) -> "CutPrompt":
        """Cuts `text` before occurrences of `token`, at least `MIN_PIECE_BYTES` apart from the beginning on.

        Args:
            beginning: of the prompt, which `text` continues.
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
        """The first `num_bytes`, cut where every prompt is that begins with them: the token is seen to its end.

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
    """A cache of pieces by the keys of their ends. Used by one thread."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[bytes, Piece] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def leading(self, keys: Sequence[bytes]) -> list[Piece]:
        """The pieces that are known of the prompt with these keys, from its first on without a gap."""
        found = []
        for key in keys:
            piece = self._pieces.get(key)
            if piece is None:
                break
            found.append(piece)
        self._touch(keys[: len(found)])
        return found

    def add(self, keys: Sequence[bytes], pieces: Sequence[Piece]) -> None:
        """Keeps the pieces of one prompt, from its first on; those that are known already stay as they are."""
        for key, piece in zip(keys, pieces, strict=True):
            if key not in self._pieces:
                self._pieces[key] = piece
                self.num_bytes += piece.num_bytes
        self._touch(keys)
        while self.num_bytes > self._max_bytes:
            _, piece = self._pieces.popitem(last=False)
            self.num_bytes -= piece.num_bytes

    def _touch(self, keys: Sequence[bytes]) -> None:
        """NOTE: the first piece last, because without it all that follow it are out of reach."""
        for key in reversed(keys):
            self._pieces.move_to_end(key)
