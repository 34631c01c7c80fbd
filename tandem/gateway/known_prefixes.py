"""Token ids and block hashes of prompts' beginnings, so that a conversation's next turn costs what is new in it.

A prompt is cut where its tokenizer cuts in any case (`text.cuts`). Each cut has a key: SHA-256 over the request's root
hash, which covers model and tenant, and all bytes before the cut. So tenants find nothing of each other, and equal keys
mean equal beginnings. Bounded in bytes; the least recently used piece goes first, and never before one after it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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
class CutPrompt:
    """A prompt in pieces. `keys`: of the places between them, so one fewer."""

    pieces: Sequence[bytes]
    keys: Sequence[bytes]

    @classmethod
    def of(cls, text: str, token: str, root: bytes) -> "CutPrompt":
        """Cuts `text` before occurrences of `token`, at least `MIN_PIECE_BYTES` apart from the beginning on."""
        pieces = _pieces(text.encode("utf-8", "surrogatepass"), token.encode())
        digest = hashlib.sha256(root)
        keys = []
        for piece in pieces[:-1]:
            digest.update(piece)
            keys.append(digest.digest())
        return cls(pieces, keys)


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
