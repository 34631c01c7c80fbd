"""Places of a conversation's messages, or items, in the bytes of its body. Pure."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")([ \t\r\n]*:)?|[\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = b"[{", b"]}"


@dataclass(frozen=True, slots=True)
class MessageSpans:
    """Offsets of the beginning and the end of each message. Between two are a comma and space."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def find(cls, body: bytes, member: str = "messages") -> "MessageSpans | None":
        """The messages of `body`, a valid JSON object. None if they are not objects in one array, or if another member
        of the body might have the same name.

        Args:
            member: the name of the array.
        """
        wanted = b'"%b"' % member.encode()
        depth, num_arrays, array_depth = 0, 0, 0
        name = b""
        starts: list[int] = []
        ends: list[int] = []
        for found in _TOKEN.finditer(body):
            token = found[1] or found[0]
            if token in _OPENING:
                depth += 1
                if depth == 2 and name == wanted and token == b"[":
                    num_arrays, array_depth = num_arrays + 1, 1
                elif depth == 3 and array_depth:
                    starts.append(found.start())
            elif token in _CLOSING:
                depth -= 1
                if depth == 2 and array_depth:
                    ends.append(found.end())
                elif depth == 1:
                    array_depth, name = 0, b""
            elif depth == 1 and found[2]:
                if b"\\" in token or (token == wanted and num_arrays):
                    return None
                name = token
            elif depth == 2 and array_depth:
                return None
        return cls(tuple(starts), tuple(ends)) if num_arrays == 1 and len(starts) == len(ends) else None
