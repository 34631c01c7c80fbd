"""Finds the byte offsets of a conversation's messages (or items) in its JSON body, without parsing it. Pure.

`known_conversations` uses them to leave out known messages of a body.
"""

import re
from dataclasses import dataclass

_TOKEN = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")([ \t\r\n]*:)?|[\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = b"[{", b"]}"


@dataclass(frozen=True, slots=True)
class MessageSpans:
    """Byte offsets of the start and the end of each message. Only a comma and white space lie between two messages."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def find(cls, body: bytes, member: str = "messages") -> "MessageSpans | None":
        """Locates the messages in `body`, a valid JSON object.

        Returns None if they are not all objects in one array, or if another member of the body might have the same
        name.

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
